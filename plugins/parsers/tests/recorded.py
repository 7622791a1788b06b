"""Answers as models of each family write them, and what is in them."""

from __future__ import annotations

from typing import Any, NamedTuple

BAR = "\N{FULLWIDTH VERTICAL LINE}"
LOW = "\N{LOWER ONE EIGHTH BLOCK}"


def weather_tool(name: str = "get_weather") -> dict[str, Any]:
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "celsius": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"type": "object"},
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": properties, "required": ["city"]},
        },
    }


TOOLS = [weather_tool(), weather_tool("get_time")]


class Recorded(NamedTuple):
    format: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    """Name and arguments."""
    prompt_end: str = ""


def deepseek(*words: str) -> str:
    return f"<{BAR}{LOW.join(words)}{BAR}>"


JSON_PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
JSON_OSLO = '{"name": "get_time", "arguments": {"city": "Oslo", "days": 3}}'
CALLS = deepseek("tool", "calls", "begin")
END_CALLS = deepseek("tool", "calls", "end")
CALL = deepseek("tool", "call", "begin")
END_CALL = deepseek("tool", "call", "end")
SEP = deepseek("tool", "sep")
PARIS = ("get_weather", {"city": "Paris"})
OSLO = ("get_time", {"city": "Oslo", "days": 3})

RECORDED = {
    # Hermes, Qwen
    "hermes-one": Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        calls=(PARIS,),
    ),
    "hermes-two": Recorded(
        "hermes",
        'I will look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call>\n"
        '<tool_call>\n{"name": "get_time", "arguments": {"city": "Oslo", "days": 3}}\n'
        "</tool_call>\n",
        "I will look.",
        calls=(PARIS, OSLO),
    ),
    "hermes-arguments-first": Recorded(
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris"}, "id": 7, "name": "get_weather"}</tool_call>',
        calls=(PARIS,),
    ),
    "hermes-no-arguments": Recorded(
        "hermes", '<tool_call>{"name": "get_weather"}</tool_call>', calls=(("get_weather", {}),)
    ),
    "hermes-arguments-as-text": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        calls=(PARIS,),
    ),
    "hermes-nested": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "S\\u00e3o \\"x\\" '
        '</tool_call> {", "where": {"a": [1, -2.5e3, null]}, '
        '"celsius": true}}</tool_call>',
        calls=(
            (
                "get_weather",
                {
                    "city": 'São "x" </tool_call> {',
                    "where": {"a": [1, -2500.0, None]},
                    "celsius": True,
                },
            ),
        ),
    ),
    "hermes-new-line-in-text": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}</tool_call>',
        calls=(("get_weather", {"city": "a\nb\tc"}),),
    ),
    "hermes-no-close": Recorded(
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        calls=(PARIS,),
    ),
    "hermes-text-after": Recorded(
        "hermes",
        'A <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n\nB '
        "<b> C",
        "A\n\nB <b> C",
        calls=(PARIS,),
    ),
    "hermes-list": Recorded(
        "hermes",
        f"<tool_call>[{JSON_PARIS}, {JSON_OSLO}]",
        calls=(PARIS, OSLO),
    ),
    "hermes-none": Recorded(
        "hermes",
        "Nothing < here </tool_call> is a call. ",
        "Nothing < here </tool_call> is a call. ",
    ),
    "hermes-malformed": Recorded(
        "hermes", "A <tool_call>\n{'name': f}\n</tool_call>", "A \n{'name': f}\n"
    ),
    "hermes-malformed-then-well": Recorded(
        "hermes",
        '<tool_call>{"name": 3}</tool_call><tool_call>{"name": "get_weather", "arguments": '
        '{"city": "Paris"}}</tool_call>',
        '{"name": 3}',
        calls=(PARIS,),
    ),
    "hermes-broken": Recorded(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": Paris}}</tool_call>',
        '{"name": "get_weather", "arguments": {"city": Paris}}',
    ),
    "hermes-half-a-character": Recorded(
        "hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', '{"name": "\\ud800"}'
    ),
    # Qwen3-Coder
    "coder-one": Recorded(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n"
        '<parameter=tags>\n["a", "b"]\n</parameter>\n<parameter=celsius>\nTrue\n</parameter>\n'
        "</function>\n</tool_call>",
        "Sure.",
        calls=(("get_weather", {"city": "Paris", "days": 3, "tags": ["a", "b"], "celsius": True}),),
    ),
    "coder-bare": Recorded(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n12\n<x> </parameter>\n</function>\n"
        "</tool_call>\n"
        "<tool_call><function=get_time></function></tool_call>",
        calls=(("get_weather", {"city": "12\n<x> "}), ("get_time", {})),
    ),
    "coder-broken": Recorded(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter>oops</function>"
        "</tool_call>",
        "get_weather>city>Parisoops",
    ),
    # Llama
    "llama-one": Recorded(
        "llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', calls=(PARIS,)
    ),
    "llama-two": Recorded(
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {"city": "Oslo", "days": 3}}',
        calls=(PARIS, OSLO),
    ),
    "llama-content": Recorded(
        "llama3_json",
        ' {"name": "Bob", "parameters": {}} is JSON.',
        ' {"name": "Bob", "parameters": {}} is JSON.',
    ),
    "llama-text": Recorded("llama3_json", "Hello <|python", "Hello <|python"),
    "pythonic-two": Recorded(
        "pythonic",
        "[get_weather(city=\"Paris\"), get_time(city='Oslo', days=3)]",
        calls=(PARIS, OSLO),
    ),
    "pythonic-literals": Recorded(
        "pythonic",
        "[get_weather(city='it\\'s\\n\\u00e9 \\x41', where={'a': [1, -2.5, None], \"b\": (True, "
        "False,)}, tags=[], celsius=True,)]",
        calls=(
            (
                "get_weather",
                {
                    "city": "it's\né A",
                    "where": {"a": [1, -2.5, None], "b": [True, False]},
                    "tags": [],
                    "celsius": True,
                },
            ),
        ),
    ),
    "pythonic-no-arguments": Recorded(
        "pythonic", "[get_weather()] Done.", "Done.", calls=(("get_weather", {}),)
    ),
    "pythonic-content": Recorded("pythonic", "[1, 2] is a list", "[1, 2] is a list"),
    "pythonic-code": Recorded(
        "pythonic", "[get_weather(city=__import__('os'))]", "[get_weather(city=__import__('os'))]"
    ),
    "pythonic-second-malformed": Recorded(
        "pythonic", '[get_weather(city="Paris"), oops(1)]', ", oops(1)]", calls=(PARIS,)
    ),
    # Mistral
    "mistral-list": Recorded(
        "mistral",
        f"Ok.[TOOL_CALLS] [{JSON_PARIS}, {JSON_OSLO}]",
        "Ok.",
        calls=(PARIS, OSLO),
    ),
    "mistral-named": Recorded(
        "mistral",
        '[TOOL_CALLS]get_weather[ARGS]{"city": '
        '"Paris"}[TOOL_CALLS]get_time[CALL_ID]abc123456[ARGS]{"city": "Oslo", "days": 3}',
        calls=(PARIS, OSLO),
    ),
    "mistral-bare": Recorded("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', calls=(PARIS,)),
    "mistral-malformed": Recorded("mistral", "[TOOL_CALLS]no call\nat all", "no call\nat all"),
    # DeepSeek
    "deepseek-v3": Recorded(
        "deepseek",
        f'Ok.{CALLS}{CALL}function{SEP}get_weather\n```json\n{{"city": "Paris"}}\n```{END_CALL}\n'
        f'{CALL}function{SEP}get_time\n```json\n{{"city": "Oslo", "days": 3}}\n'
        f"```{END_CALL}{END_CALLS}",
        "Ok.",
        calls=(PARIS, OSLO),
    ),
    "deepseek-v3.1": Recorded(
        "deepseek",
        f'{CALLS}{CALL}get_weather{SEP}{{"city": "Paris"}}{END_CALL}{CALL}get_time{SEP}{{"city": '
        f'"Oslo", "days": 3}}{END_CALL}{END_CALLS}',
        calls=(PARIS, OSLO),
    ),
    # Gemma
    "functiongemma": Recorded(
        "gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"
        "<start_function_call>call:get_time{city:<escape>Oslo<escape>,days:3}<end_function_call>",
        calls=(PARIS, OSLO),
    ),
    "gemma4": Recorded(
        "gemma",
        '<|tool_call>call:get_weather{city:<|"|>a, '
        '"b"}<|"|>,where:{a:[1,<|"|>x<|"|>,true],b:{}},celsius:false}<tool_call|>',
        calls=(
            (
                "get_weather",
                {"city": 'a, "b"}', "where": {"a": [1, "x", True], "b": {}}, "celsius": False},
            ),
        ),
    ),
    "gemma-malformed": Recorded(
        "gemma", "<|tool_call>call:get_weather(1)<tool_call|>", "call:get_weather(1)"
    ),
    # gpt-oss
    "harmony": Recorded(
        "harmony",
        "<|channel|>analysis<|message|>Need "
        "weather.<|end|><|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "I look it up.",
        "Need weather.",
        (PARIS,),
        prompt_end="<|start|>assistant",
    ),
    "harmony-role-recipient": Recorded(
        "harmony",
        "<|channel|>analysis<|message|>A<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>B<|end|>"
        '<|start|>assistant to=functions.get_time<|channel|>commentary json<|message|>{"city": '
        '"Oslo", "days": 3}',
        "",
        "A\n\nB",
        (OSLO,),
        prompt_end="<|start|>assistant",
    ),
    "harmony-final": Recorded(
        "harmony",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It "
        "is < 5 degrees. \n",
        "It is < 5 degrees. \n",
        "So.",
        prompt_end="<|start|>assistant",
    ),
    "harmony-begun": Recorded(
        "harmony",
        " is fine.<|return|>",
        " is fine.",
        prompt_end="<|start|>assistant<|channel|>final<|message|>It",
    ),
    "harmony-plain": Recorded(
        "harmony", "No channel.", "No channel.", prompt_end="<|start|>assistant"
    ),
    # Reasoning
    "think": Recorded("think", "<think>\nHm < 3.\n\n</think>\n\nFour.\n", "Four.\n", "Hm < 3."),
    "think-in-prompt": Recorded(
        "think", "Hm.</think>\n\nFour.", "Four.", "Hm.", prompt_end="<|assistant|>\n<think>\n"
    ),
    "think-not": Recorded(
        "think", " Four <think>.", " Four <think>.", prompt_end="<think>\n\n</think>\n\n"
    ),
    "think-open": Recorded("think", "<think>Hm </thin", "", "Hm </thin"),
    "think-mistral": Recorded("mistral_think", "[THINK]Hm.[/THINK]Four.", "Four.", "Hm."),
    "think-seed": Recorded("seed_think", "<seed:think>Hm.</seed:think>Four.", "Four.", "Hm."),
    "think-gemma": Recorded("gemma_think", "<|channel>thought\nHm.<channel|>Four.", "Four.", "Hm."),
}
