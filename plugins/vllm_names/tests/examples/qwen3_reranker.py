import sys

from vllm import LLM

chat_template = """Does the passage answer the question?
Question: {{ messages[0].content }}
Passage: {{ messages[1].content }}
"""


def get_llm() -> LLM:
    return LLM(
        model=sys.argv[1],
        runner="pooling",
        hf_overrides={
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        },
    )


def main() -> None:
    queries = ["which animal", "is the weather fine"]
    documents = ["the cat is on the roof", "the weather is fine"]
    llm = get_llm()
    outputs = llm.score(queries, documents, chat_template=chat_template)
    print("Relevance scores:", [output.outputs.score for output in outputs])


if __name__ == "__main__":
    main()
