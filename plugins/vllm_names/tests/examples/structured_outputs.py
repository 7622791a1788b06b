from enum import StrEnum

from pydantic import BaseModel
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_TOKENS = 50

sampling_params_choice = SamplingParams(
    structured_outputs=StructuredOutputsParams(choice=["Good", "Bad"])
)
prompt_choice = "Is this review good or bad? The soup was wonderful!"

sampling_params_regex = SamplingParams(
    structured_outputs=StructuredOutputsParams(regex=r"\w+@\w+\.com\n"),
    stop=["\n"],
    max_tokens=MAX_TOKENS,
)
prompt_regex = "Write an email address for Ada. Example: ada@engine.com\n"


class Kind(StrEnum):
    dog = "dog"
    cat = "cat"
    bird = "bird"


class Pet(BaseModel):
    kind: Kind
    hungry: bool


sampling_params_json = SamplingParams(
    structured_outputs=StructuredOutputsParams(json=Pet.model_json_schema()), max_tokens=MAX_TOKENS
)
prompt_json = "Describe a pet as JSON, with its kind and whether it is hungry."

grammar = """
root ::= "SELECT " column " FROM " table
column ::= "name" | "age"
table ::= "pets" | "people"
"""
sampling_params_grammar = SamplingParams(
    structured_outputs=StructuredOutputsParams(grammar=grammar), max_tokens=MAX_TOKENS
)
prompt_grammar = "Write an SQL query for the names of all pets."


def generate_output(prompt: str, sampling_params: SamplingParams, llm: LLM):
    outputs = llm.generate(prompt, sampling_params=sampling_params)
    return outputs[0].outputs[0].text


def main():
    llm = LLM(model="tiny", max_model_len=100)
    print("choice:", generate_output(prompt_choice, sampling_params_choice, llm))
    print("regex:", generate_output(prompt_regex, sampling_params_regex, llm))
    print("json:", generate_output(prompt_json, sampling_params_json, llm))
    print("grammar:", generate_output(prompt_grammar, sampling_params_grammar, llm))


if __name__ == "__main__":
    main()
