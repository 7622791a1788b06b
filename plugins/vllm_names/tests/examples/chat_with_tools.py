import json
import sys

from vllm import LLM
from vllm.sampling_params import SamplingParams

sampling_params = SamplingParams(max_tokens=128, temperature=0.0)
llm = LLM(model=sys.argv[1])


def get_current_weather(city: str, unit: str = "celsius"):
    return f"It is 20 degrees {unit} in {city}."


tool_functions = {"get_current_weather": get_current_weather, "get_weather": get_current_weather}
tools = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The city"}},
                "required": ["city"],
            },
        },
    }
]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
outputs = llm.chat(messages, sampling_params=sampling_params, tools=tools)
output = outputs[0].outputs[0].text.strip()
print("Call:", output)
messages.append({"role": "assistant", "content": output})
call = json.loads(output.removeprefix("<tool_call>").removesuffix("</tool_call>"))
answer = tool_functions[call["name"]](**call["arguments"])
messages.append({"role": "tool", "content": answer, "tool_call_id": "abcdef123"})
outputs = llm.chat(messages, sampling_params, tools=tools)
print("Answer:", outputs[0].outputs[0].text.strip())
