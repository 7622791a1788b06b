"""Formats of single families: answers by the examples of their templates, and how each writes
calls; beside those of recorded.py and malformed.py."""

from __future__ import annotations

import malformed
import recorded
from malformed import Fault, Written
from recorded import BAR, JSON_OSLO, JSON_PARIS, OSLO, PARIS, Recorded

DSML = f"{BAR}DSML{BAR}"
BOTH = (PARIS, OSLO)
ARGS_PARIS = '{"city": "Paris"}'
ARGS_OSLO = '{"city": "Oslo", "days": 3}'


def tagged(begin: str, between: str, end: str) -> tuple[str, str]:
    """The arguments of Paris and of Oslo, each between the tags of a parameter."""
    paris, oslo, days = (
        f"{begin}{key}{between}{value}{end}"
        for key, value in (("city", "Paris"), ("city", "Oslo"), ("days", "3"))
    )
    return paris, oslo + days


def typed(begin: str, text: str, other: str, end: str) -> tuple[str, str]:
    """As `tagged`, where a parameter says whether it is a text."""
    return (
        f"{begin}city{text}Paris{end}",
        f"{begin}city{text}Oslo{end}{begin}days{other}3{end}",
    )


ARG = tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
DSML_ARG = typed(
    f'<{DSML}parameter name="', '" string="true">', '" string="false">', f"</{DSML}parameter>\n"
)
KIMI_ARG = typed(
    '<|open|>argument key="',
    '" type="string"<|sep|>',
    '" type="number"<|sep|>',
    "<|close|>argument<|sep|>",
)
PARAM = tagged('<param name="', '">', "</param>")
INVOKE_ARG = tagged('<parameter name="', '">', "</parameter>\n")
SEED_ARG = tagged("<parameter=", ">", "</parameter>\n")
STEP_ARG = tagged('<steptml:parameter name="', '">', "</steptml:parameter>")
NS = "]<]minimax[>["
M3_ARG = (
    f"{NS}<city>Paris{NS}</city>",
    f"{NS}<city>Oslo{NS}</city>{NS}<days>3{NS}</days>",
)
SOLAR_ARG = tagged("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n")
INKLING = "<|content_invoke_tool_json|>"
STEP = f"<{BAR}tool_call_begin{BAR}>function<{BAR}tool_sep{BAR}>"
STEP_END = f"</steptml:invoke><{BAR}tool_call_end{BAR}>"
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")

NEW_RECORDED = {
    "apertus": Recorded(
        "apertus",
        f'Hm. <|tools_prefix|>[{{"get_weather": {ARGS_PARIS}}}, {{"get_time": {ARGS_OSLO}}}]'
        "<|tools_suffix|>",
        "Hm.",
        calls=BOTH,
    ),
    "cohere": Recorded(
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{ARGS_PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "get_time", "parameters": '
        f"{ARGS_OSLO}}}\n]<|END_ACTION|>",
        calls=BOTH,
    ),
    "deepseek_v4": Recorded(
        "deepseek_v4",
        f'Hm.\n\n<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n{DSML_ARG[0]}'
        f'</{DSML}invoke>\n<{DSML}invoke name="get_time">\n{DSML_ARG[1]}</{DSML}invoke>\n'
        f"</{DSML}tool_calls>",
        "Hm.",
        calls=BOTH,
    ),
    "deepseek_v4-text-that-looks-like-a-number": Recorded(
        "deepseek_v4",
        f'<{DSML}tool_calls>\n<{DSML}invoke name="get_weather">\n<{DSML}parameter name="city" '
        f'string="true">75001</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}tool_calls>',
        calls=(("get_weather", {"city": "75001"}),),
    ),
    "deepseek_v32": Recorded(
        "deepseek_v32",
        f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n{DSML_ARG[0]}'
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        calls=(PARIS,),
    ),
    "function_tag": Recorded(
        "function_tag",
        f"<function=get_weather>{ARGS_PARIS}</function><function=get_time>{ARGS_OSLO}</function>",
        calls=BOTH,
    ),
    "functionary": Recorded(
        "functionary",
        f"all\nI will look.>>>get_weather\n{ARGS_PARIS}>>>get_time\n{ARGS_OSLO}",
        "I will look.",
        calls=BOTH,
        prompt_end="assistant<|end_header_id|>\n\n>>>",
    ),
    "functionary-content": Recorded(
        "functionary", "all\nIt is fine.", "It is fine.", prompt_end="<|end_header_id|>\n\n>>>"
    ),
    "gigachat": Recorded(
        "gigachat", f"Hm.function call<|role_sep|>\n{JSON_PARIS}", "Hm.", calls=(PARIS,)
    ),
    "glm-4.5": Recorded(
        "glm",
        f"Hm.\n<tool_call>get_weather\n{ARG[0]}</tool_call>\n<tool_call>get_time\n{ARG[1]}"
        "</tool_call>",
        "Hm.",
        calls=BOTH,
    ),
    "glm-4.7": Recorded(
        "glm",
        "<tool_call>get_time<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days"
        "</arg_key><arg_value>3</arg_value></tool_call>",
        calls=(OSLO,),
    ),
    "glm-no-arguments": Recorded(
        "glm", "<tool_call>get_time</tool_call>", calls=(("get_time", {}),)
    ),
    "glm-spaces-stay": Recorded(
        "glm",
        "<tool_call>get_time\n<arg_key>city</arg_key>\n<arg_value>  a\n</arg_value>\n</tool_call>",
        calls=(("get_time", {"city": "  a\n"}),),
    ),
    "granite": Recorded("granite", f"<|tool_call|>[{JSON_PARIS}, {JSON_OSLO}]", calls=BOTH),
    "granite_code": Recorded("granite_code", f"<function_call> {JSON_PARIS}", calls=(PARIS,)),
    "hunyuan": Recorded(
        "hunyuan",
        f"Hm.<tool_calls>[{JSON_PARIS}, {JSON_OSLO}]</tool_calls>\n",
        "Hm.",
        calls=BOTH,
    ),
    "hunyuan-jamba": Recorded(
        "hunyuan",
        f"<tool_calls>[\n    {JSON_PARIS},\n    {JSON_OSLO}\n]</tool_calls>",
        calls=BOTH,
    ),
    "hunyuan_v3": Recorded(
        "hunyuan_v3",
        f"<tool_calls>\n<tool_call>get_weather<tool_sep>\n{ARG[0]}</tool_call>\n"
        f"<tool_call>get_time<tool_sep>\n{ARG[1]}</tool_call>\n</tool_calls>",
        calls=BOTH,
    ),
    "hunyuan_v3-no-arguments": Recorded(
        "hunyuan_v3",
        "<tool_calls><tool_call>get_time<tool_sep></tool_call></tool_calls>",
        calls=(("get_time", {}),),
    ),
    "internlm": Recorded(
        "internlm",
        'Hm.<|action_start|><|plugin|>\n{"name": "get_weather", "parameters": '
        f"{ARGS_PARIS}}}<|action_end|>",
        "Hm.",
        calls=(PARIS,),
    ),
    "kimi_k2": Recorded(
        "kimi_k2",
        f"Hm.{KIMI[0]}<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{ARGS_PARIS}<|tool_call_end|><|tool_call_begin|>functions.get_time:1"
        f"<|tool_call_argument_begin|>{ARGS_OSLO}<|tool_call_end|>{KIMI[1]}",
        "Hm.",
        calls=BOTH,
    ),
    "kimi_k2-line": Recorded(
        "kimi_k2",
        f"{KIMI[0]}<|tool_call_begin|>functions.get_weather:0\n<|tool_call_argument_begin|>"
        f"{ARGS_PARIS}<|tool_call_end|>{KIMI[1]}",
        calls=(PARIS,),
    ),
    "kimi_k3": Recorded(
        "kimi_k3",
        "<|open|>response<|sep|>Hm.<|close|>response<|sep|><|open|>tools<|sep|>"
        f'<|open|>call tool="get_weather" index="1"<|sep|>{KIMI_ARG[0]}<|close|>call<|sep|>'
        f'<|open|>call tool="get_time" index="2"<|sep|>{KIMI_ARG[1]}<|close|>call<|sep|>'
        "<|close|>tools<|sep|><|close|>message<|sep|>",
        "Hm.",
        calls=BOTH,
    ),
    "lfm2": Recorded(
        "lfm2",
        '<|tool_call_start|>[get_weather(city="Paris"), get_time(city="Oslo", days=3)]'
        "<|tool_call_end|>Looking.",
        "Looking.",
        calls=BOTH,
    ),
    "lfm2-json": Recorded(
        "lfm2", f"<|tool_call_start|>[{JSON_PARIS}]<|tool_call_end|>", calls=(PARIS,)
    ),
    "longcat": Recorded(
        "longcat",
        f"<longcat_tool_call>{JSON_PARIS}</longcat_tool_call>\n"
        f"<longcat_tool_call>{JSON_OSLO}</longcat_tool_call>",
        calls=BOTH,
    ),
    "minicpm": Recorded(
        "minicpm", f'<function name="get_time">{PARAM[1]}</function>', calls=(OSLO,)
    ),
    "minimax": Recorded(
        "minimax",
        f'Hm.\n<minimax:tool_call>\n<invoke name="get_weather">\n{INVOKE_ARG[0]}</invoke>\n'
        f'<invoke name="get_time">\n{INVOKE_ARG[1]}</invoke>\n</minimax:tool_call>',
        "Hm.",
        calls=BOTH,
    ),
    "minimax_m1": Recorded(
        "minimax_m1", f"<tool_calls>\n{JSON_PARIS}\n{JSON_OSLO}\n</tool_calls>", calls=BOTH
    ),
    "minimax_m3": Recorded(
        "minimax_m3",
        f'Hm.{NS}<tool_call>\n{NS}<invoke name="get_weather">{M3_ARG[0]}{NS}</invoke>\n'
        f'{NS}<invoke name="get_time">{M3_ARG[1]}{NS}</invoke>\n{NS}</tool_call>',
        "Hm.",
        calls=BOTH,
    ),
    "minimax_m3-lines": Recorded(
        "minimax_m3",
        f'{NS}<tool_call>\n{NS}<invoke name="get_weather">\n{NS}<city>Paris{NS}</city>\n'
        f"{NS}<tags>\n{NS}<item>a{NS}</item>\n{NS}<item>b <c>{NS}</item>\n{NS}</tags>\n"
        f"{NS}<where>{NS}<x>1{NS}</x>{NS}<y>{NS}<item>z{NS}</item>{NS}</y>{NS}</where>\n"
        f"{NS}</invoke>\n{NS}</tool_call>",
        calls=(
            (
                "get_weather",
                {"city": "Paris", "tags": ["a", "b <c>"], "where": {"x": "1", "y": ["z"]}},
            ),
        ),
    ),
    "minimax_m3-empty": Recorded(
        "minimax_m3",
        f'{NS}<tool_call>{NS}<invoke name="get_time">{NS}<city>{NS}</city>{NS}<tags>{NS}</tags>'
        f"{NS}</invoke>{NS}</tool_call>",
        calls=(("get_time", {"city": "", "tags": []}),),
    ),
    "inkling": Recorded(
        "inkling",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>I look."
        f"<|end_message|><|message_model|>get_weather{INKLING}"
        f'{{"name": "get_weather", "args": {ARGS_PARIS}}}<|end_message|><|message_model|>get_time'
        f'{INKLING}{{"name": "get_time", "args": {ARGS_OSLO}}}<|end_message|>',
        "I look.",
        "Hm.",
        calls=BOTH,
        prompt_end="<|message_model|>",
    ),
    "inkling-begun": Recorded(
        "inkling",
        "Hm.<|end_message|><|message_model|><|content_text|>Four.<|end_message|>",
        "Four.",
        "Hm.",
        prompt_end="<|message_model|><|content_thinking|>",
    ),
    "inkling-plain": Recorded("inkling", "Four. It is.", "Four. It is."),
    "nemotron": Recorded("nemotron", f"<TOOLCALL>[{JSON_PARIS}]</TOOLCALL>", calls=(PARIS,)),
    "olmo3": Recorded(
        "olmo3",
        '<function_calls>\nget_weather(city="Paris")\nget_time(city="Oslo", days=3)\n'
        "</function_calls>",
        calls=BOTH,
    ),
    "phi4_mini": Recorded("phi4_mini", f"functools[{JSON_PARIS}, {JSON_OSLO}]", calls=BOTH),
    "phi4_mini-marks": Recorded(
        "phi4_mini", f"<|tool_call|>[{JSON_PARIS}]<|/tool_call|>", calls=(PARIS,)
    ),
    "phi4_mini-code": Recorded(
        "phi4_mini", "Use functools[cache] or not.", "Use functools[cache] or not."
    ),
    "seed": Recorded(
        "seed",
        f"<seed:tool_call>\n<function=get_weather>\n{SEED_ARG[0]}</function>\n</seed:tool_call>",
        calls=(PARIS,),
    ),
    "solar": Recorded(
        "solar",
        f"Hm.<|tool_call:start|>get_weather\n{SOLAR_ARG[0]}<|tool_call:end|>\n"
        f"<|tool_call:start|>get_time\n{SOLAR_ARG[1]}<|tool_call:end|>",
        "Hm.",
        calls=BOTH,
    ),
    "step3": Recorded(
        "step3",
        f'Hm.\n\n<{BAR}tool_calls_begin{BAR}>{STEP}<steptml:invoke name="get_weather">'
        f"{STEP_ARG[0]}{STEP_END}<{BAR}tool_sep{BAR}><{BAR}tool_call_begin{BAR}><steptml:invoke "
        f'name="get_time">{STEP_ARG[1]}{STEP_END}<{BAR}tool_calls_end{BAR}>\n\nI look.',
        "Hm.\n\nI look.",
        calls=BOTH,
    ),
    # Reasoning
    "think-answer": Recorded(
        "answer_think", "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>", "Four.\n", "Hm."
    ),
    "think-response": Recorded(
        "response_think",
        "\nHm.\n</think>\n\n<response>\nFour.\n</response>",
        "Four.\n",
        "Hm.",
        prompt_end="<think>\n",
    ),
    "think-cohere": Recorded(
        "cohere_think",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>",
        "Four.",
        "Hm.",
    ),
    "think-kimi": Recorded(
        "kimi_think",
        "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>"
        "response<|sep|><|close|>message<|sep|>",
        "Four.",
        "Hm.",
    ),
    "think-kimi-not": Recorded(
        "kimi_think",
        "<|open|>response<|sep|>Four.<|close|>response<|sep|><|close|>message<|sep|>",
        "Four.",
    ),
    "think-apertus": Recorded(
        "apertus_think", "<|inner_prefix|>Hm.<|inner_suffix|>Four.", "Four.", "Hm."
    ),
    "think-minimax": Recorded("minimax_think", "<mm:think>Hm.</mm:think>Four.", "Four.", "Hm."),
    "think-solar": Recorded(
        "solar_think", "Hm.<|think:end|>Four.", "Four.", "Hm.", prompt_end="<|think:start|>"
    ),
    "think-granite": Recorded(
        "granite_think",
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nFour.",
        "Four.",
        "Hm.",
    ),
}
NEW_THINKING = {one.format for name, one in NEW_RECORDED.items() if name.startswith("think")}
RECORDED = {**recorded.RECORDED, **NEW_RECORDED}


def of_json(
    begin: str, end: str, *marks: str, keys: tuple[str, str] = ("name", "arguments")
) -> Written:
    """Objects of JSON with two keys between two texts."""
    name, arguments = keys
    return Written(f'{begin}{{"{name}": "', f'", "{arguments}": ', f"}}{end}", marks, marks[0])


NEW_WRITTEN = {
    "apertus": Written(
        '<|tools_prefix|>[{"',
        '": ',
        "}]<|tools_suffix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        "<|tools_prefix|>",
    ),
    "cohere": of_json(
        "<|START_ACTION|>[",
        "]<|END_ACTION|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        keys=("tool_name", "parameters"),
    ),
    "deepseek_v4": Written(
        f'<{DSML}tool_calls>\n<{DSML}invoke name="',
        '">\n',
        f"</{DSML}invoke>\n</{DSML}tool_calls>",
        (f"<{DSML}tool_calls>", f"</{DSML}invoke>"),
        f"<{DSML}tool_calls>",
        *DSML_ARG,
    ),
    "deepseek_v32": Written(
        f'<{DSML}function_calls>\n<{DSML}invoke name="',
        '">\n',
        f"</{DSML}invoke>\n</{DSML}function_calls>",
        (f"<{DSML}function_calls>", f"</{DSML}invoke>"),
        f"<{DSML}function_calls>",
        *DSML_ARG,
    ),
    "function_tag": Written("<function=", ">", "</function>", ("<function=",), "<function="),
    "functionary": Written(">>>", "\n", "", (">>>",), ">>>"),
    "gigachat": of_json("function call<|role_sep|>\n", "", "function call<|role_sep|>"),
    "glm": Written("<tool_call>", "\n", "</tool_call>", ("<tool_call>",), "<tool_call>", *ARG),
    "granite": of_json("<|tool_call|>[", "]", "<|tool_call|>"),
    "granite_code": of_json("<function_call> ", "", "<function_call>"),
    "hunyuan": of_json("<tool_calls>[", "]</tool_calls>", "<tool_calls>", "</tool_calls>"),
    "hunyuan_v3": Written(
        "<tool_calls>\n<tool_call>",
        "<tool_sep>\n",
        "</tool_call>\n</tool_calls>",
        ("<tool_calls>", "<tool_call>"),
        "<tool_calls>",
        *ARG,
    ),
    "internlm": of_json(
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        keys=("name", "parameters"),
    ),
    "kimi_k2": Written(
        f"{KIMI[0]}<|tool_call_begin|>functions.",
        ":0<|tool_call_argument_begin|>",
        f"<|tool_call_end|>{KIMI[1]}",
        (*KIMI, "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|tool_call_begin|>",
    ),
    "kimi_k3": Written(
        '<|open|>tools<|sep|><|open|>call tool="',
        '" index="1"<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        ("<|open|>tools<|sep|>", "<|close|>call<|sep|>"),
        "<|open|>tools<|sep|>",
        *KIMI_ARG,
    ),
    "lfm2": Written(
        "<|tool_call_start|>[",
        "(",
        ")]<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        "<|tool_call_start|>",
        "city='Paris'",
        "city='Oslo', days=3",
    ),
    "longcat": of_json("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_tool_call>"),
    "minicpm": Written(
        '<function name="', '">', "</function>", ('<function name="',), '<function name="', *PARAM
    ),
    "minimax": Written(
        '<minimax:tool_call>\n<invoke name="',
        '">\n',
        "</invoke>\n</minimax:tool_call>",
        ("<minimax:tool_call>", "</invoke>"),
        "<minimax:tool_call>",
        *INVOKE_ARG,
    ),
    "minimax_m1": of_json("<tool_calls>\n", "\n</tool_calls>", "<tool_calls>", "</tool_calls>"),
    "minimax_m3": Written(
        f'{NS}<tool_call>\n{NS}<invoke name="',
        '">',
        f"{NS}</invoke>\n{NS}</tool_call>",
        (f"{NS}<tool_call>", f"{NS}</invoke>"),
        f"{NS}<tool_call>",
        *M3_ARG,
    ),
    "inkling": of_json(
        f"<|message_model|>{INKLING}", "<|end_message|>", INKLING, keys=("name", "args")
    ),
    "nemotron": of_json("<TOOLCALL>[", "]</TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    "olmo3": Written(
        "<function_calls>\n",
        "(",
        ")\n</function_calls>",
        ("<function_calls>", "</function_calls>"),
        "<function_calls>",
        "city='Paris'",
        "city='Oslo', days=3",
    ),
    "phi4_mini": of_json("<|tool_call|>[", "]<|/tool_call|>", "<|tool_call|>", "<|/tool_call|>"),
    "seed": Written(
        "<seed:tool_call>\n<function=",
        ">\n",
        "</function>\n</seed:tool_call>",
        ("<seed:tool_call>", "</function>"),
        "<seed:tool_call>",
        *SEED_ARG,
    ),
    "solar": Written(
        "<|tool_call:start|>",
        "\n",
        "<|tool_call:end|>",
        ("<|tool_call:start|>", "<|tool_call:end|>"),
        "<|tool_call:start|>",
        *SOLAR_ARG,
    ),
    "step3": Written(
        f'<{BAR}tool_call_begin{BAR}><steptml:invoke name="',
        '">',
        STEP_END,
        (f"<{BAR}tool_call_begin{BAR}>", "</steptml:invoke>"),
        f"<{BAR}tool_call_begin{BAR}>",
        *STEP_ARG,
    ),
}
WRITTEN = {**malformed.WRITTEN, **NEW_WRITTEN}
FIELD = {
    **malformed.FIELD,
    **{name: Fault(name, one.paris, calls=(PARIS,)) for name, one in NEW_WRITTEN.items()},
}
