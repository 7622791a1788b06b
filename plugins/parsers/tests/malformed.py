"""Answers with known faults, as they were seen in the field, and how they are to be read."""

from __future__ import annotations

from typing import Any, NamedTuple

from recorded import CALL, CALLS, END_CALL, END_CALLS, OSLO, PARIS, SEP

CITY = '{"city": "Paris"}'
DAYS = '{"city": "Oslo", "days": 3}'


class Written(NamedTuple):
    """How a format writes calls."""

    begin: str
    """Before the name; what no content may have is its mark."""
    between: str
    """Between name and arguments."""
    end: str
    marks: tuple[str, ...]
    """Never content."""
    opener: str
    city: str = CITY
    days: str = DAYS
    """Arguments, in the format's own manner."""

    @property
    def paris(self) -> str:
        return f"{self.begin}get_weather{self.between}{self.city}{self.end}"

    @property
    def oslo(self) -> str:
        return f"{self.begin}get_time{self.between}{self.days}{self.end}"


XML_MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
)
HEADER = "<|start|>assistant<|channel|>commentary to=functions."
WRITTEN = {
    "hermes": Written(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        "}\n</tool_call>",
        XML_MARKS[:2],
        "<tool_call>",
    ),
    "qwen3_coder": Written(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        XML_MARKS,
        "<tool_call>",
        "<parameter=city>\nParis\n</parameter>\n",
        "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
    ),
    "llama3_json": Written(
        '{"name": "', '", "parameters": ', "}", ("<|python_tag|>",), "<|python_tag|>"
    ),
    "pythonic": Written(
        "[",
        "(",
        ")]",
        ("<|python_start|>", "<|python_end|>"),
        "<|python_start|>",
        "city='Paris'",
        "city='Oslo', days=3",
    ),
    "mistral": Written("[TOOL_CALLS]", "[ARGS]", "", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]"),
    "mistral old": Written(
        '[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]", ("[TOOL_CALLS]",), "[TOOL_CALLS]"
    ),
    "deepseek": Written(
        f"{CALL}function{SEP}", "\n```json\n", f"\n```{END_CALL}", (CALL, END_CALL, SEP), CALL
    ),
    "deepseek v3.1": Written(CALL, SEP, END_CALL, (CALL, END_CALL, SEP), CALL),
    "gemma": Written(
        "<|tool_call>call:",
        "",
        "<tool_call|>",
        ("<|tool_call>", "<tool_call|>"),
        "<|tool_call>",
        '{city:<|"|>Paris<|"|>}',
        '{city:<|"|>Oslo<|"|>,days:3}',
    ),
    "functiongemma": Written(
        "<start_function_call>call:",
        "",
        "<end_function_call>",
        ("<start_function_call>", "<end_function_call>"),
        "<start_function_call>",
        "{city:<escape>Paris<escape>}",
        "{city:<escape>Oslo<escape>,days:3}",
    ),
    "harmony": Written(
        HEADER,
        " <|constrain|>json<|message|>",
        "<|call|>",
        ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>"),
        "<|channel|>",
    ),
}
"""Malformed calls by format and variant."""
FORMS = {"functiongemma": "gemma"}


def form_of(name: str) -> str:
    """The name that a format is registered by."""
    return FORMS.get(name) or name.split()[0]


class Fault(NamedTuple):
    """One answer, and how it is to be read."""

    format: str
    text: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    reasoning: str = ""
    prompt_end: str = ""


def of_each(written: Written) -> dict[str, tuple[str, int, str]]:
    """Faults that any format may have: the text, how many calls are in it, and words that its
    content has."""
    half = written.paris[
        : len(written.begin) + len("get_weather") + len(written.between) + len(written.city) - 5
    ]
    broken = f"{written.begin}get_weather{written.between}not JSON at all{written.end}"
    return {
        "bare opener": (f"{written.opener}{written.oslo}", 1, ""),
        "bare opener twice": (f"{written.opener}\n{written.opener}\n{written.oslo}", 1, ""),
        "bare opener alone": (written.opener, 0, ""),
        "prose after an opener": (
            f"{written.opener}I would rather talk.\n{written.oslo}",
            1,
            "rather talk",
        ),
        "arguments that are none": (f"{broken}", 0, "not JSON at all"),
        "arguments that are none, then a call": (f"{broken}\n{written.oslo}", 1, "not JSON at all"),
        "a call that is given up": (f"{half}\n{written.oslo}", 1, ""),
        "a preface": (f"I look it up.\n\n{written.oslo}", 1, "I look it up."),
        "a second on a new line": (f"{written.paris}\n{written.oslo}", 2, ""),
        "a second after a remark": (
            f"{written.paris}\nAnd there:\n{written.oslo}",
            2,
            "And there:",
        ),
        "text after it": (f"{written.oslo}\n\nShall I go on?", 1, "Shall I go on?"),
        "in quotes of its own": (
            f'She said "{written.opener}" and went.\n{written.oslo}',
            1,
            "and went",
        ),
    }


JSON_FAULTS = {
    "single quotes": ("{'city': 'Oslo', 'days': 3}", OSLO[1]),
    "an apostrophe": ("{'city': \"O'slo\"}", {"city": "O'slo"}),
    "an escaped apostrophe": ("{'city': 'O\\'slo', \"days\": 3}", {"city": "O'slo", "days": 3}),
    "double in single": ("{'city': 'the \"city\"'}", {"city": 'the "city"'}),
    "round quotes": ("{\u201ccity\u201d: \u201cOslo\u201d, \u201cdays\u201d: 3}", OSLO[1]),
    "no quotes around keys": ('{city: "Oslo", days: 3}', OSLO[1]),
    "True, False, None": (
        '{"a": True, "b": False, "c": None, "d": TRUE}',
        {"a": True, "b": False, "c": None, "d": True},
    ),
    "a comma too many": (
        '{"city": "Oslo", "tags": ["a", "b",], "days": 3,}',
        {**OSLO[1], "tags": ["a", "b"]},
    ),
    "a tuple": ('{"tags": ("a", "b")}', {"tags": ["a", "b"]}),
    "a bracket too few inside": (
        '{"where": {"x": [1, 2}, "days": 3}',
        {"where": {"x": [1, 2]}, "days": 3},
    ),
    "new lines in a text": ('{"city": "Os\nlo\t"}', {"city": "Os\nlo\t"}),
    "escapes that are none": (
        r'{"city": "C:\Users\docs \d+ \$HOME"}',
        {"city": r"C:\Users\docs \d+ $HOME".replace("$", r"\$")},
    ),
    "escapes of Python": (r"{'city': '\x4f\x73lo'}", {"city": "Oslo"}),
    "numbers of Python": (
        '{"a": 1_000, "b": +1, "c": .5, "d": 2., "e": -.5e3}',
        {"a": 1000, "b": 1, "c": 0.5, "d": 2.0, "e": -500.0},
    ),
    "as a text": ('"{\\"city\\": \\"Oslo\\", \\"days\\": 3}"', OSLO[1]),
    "as a text of Python": ("\"{'city': 'Oslo', 'days': 3}\"", OSLO[1]),
    "half a character": (r'{"city": "\ud800"}', None),
    "half a character in a list": (r'{"tags": ["a", "\udc00b"]}', None),
    "half a character in a key": (r'{"\ud800": 1}', None),
    "a number that is too large": ('{"days": 1e999}', None),
    "a number that is too small": ('{"where": {"x": -1e999}}', None),
    "a number that is too large in a text": ("\"{'days': 1e999}\"", None),
    "null": ("null", {}),
    "an empty text": ('""', {}),
}
"""Arguments, for all formats that write them as JSON, and what they are; None: none that every
reader of JSON takes, so content."""
UNREADABLE = {
    "qwen3_coder": (
        r'<parameter=where>{"x": "\ud800"}</parameter>',
        "<parameter=where>{'x': 1e999}</parameter>",
    ),
    "pythonic": (r"city='\ud800'", "days=1e999"),
    "gemma": (r'{city:"\ud800"}', "{days:1e999}"),
    "functiongemma": (r'{city:"\ud800"}', "{days:1e999}"),
}
"""Malformed calls in the manner of other formats."""
UNCLOSED = {
    "the last bracket": ('{"city": "Oslo", "days": 3', OSLO[1]),
    "two brackets": ('{"city": "Oslo", "where": {"x": [1', {"city": "Oslo", "where": {"x": [1]}}),
    "a comma left": ('{"city": "Oslo",', {"city": "Oslo"}),
}
"""Arguments whose last brackets are missing, where the format's own mark ends the call."""
AS_JSON = (
    "hermes",
    "llama3_json",
    "mistral",
    "mistral old",
    "deepseek",
    "deepseek v3.1",
    "harmony",
)
WITH_END = ("hermes", "deepseek", "deepseek v3.1", "harmony")

FIELD = {
    # Qwen and Hermes
    "a brace too few": Fault(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}\n</tool_call>',
        calls=(PARIS,),
    ),
    "a brace too many": Fault(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}}}\n</tool_call>',
        calls=(PARIS,),
    ),
    "doubled braces": Fault(
        "hermes",
        f'<tool_call>\n{{{{"name": "get_weather", "arguments": {CITY}}}}}\n</tool_call>',
        calls=(PARIS,),
    ),
    "a dict of Python": Fault(
        "hermes",
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Paris'}}</tool_call>",
        calls=(PARIS,),
    ),
    "a mark in prose, then a call": Fault(
        "hermes",
        f'Wrap it in <tool_call> tags, so:\n<tool_call>{{"name": "get_weather", "arguments": '
        f"{CITY}}}</tool_call>",
        "Wrap it in  tags, so:",
        (PARIS,),
    ),
    "a template's placeholders": Fault(
        "hermes",
        f'<tool_call>{{"name": <function-name>, "arguments": '
        f'{{}}}}</tool_call><tool_call>{{"name": "get_weather", "arguments": {CITY}}}',
        '{"name": <function-name>, "arguments": {}}',
        (PARIS,),
    ),
    "quotes that are not escaped": Fault(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "the "big" one"}}</tool_call>',
        '{"name": "get_weather", "arguments": {"city": "the "big" one"}}',
    ),
    "a mark within a text": Fault(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": '
        '"<tool_call>{}</tool_call>"}}</tool_call>',
        calls=(("get_weather", {"city": "<tool_call>{}</tool_call>"}),),
    ),
    "XML from a model of JSON": Fault(
        "hermes",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>",
        calls=(PARIS,),
    ),
    "two calls between two marks": Fault(
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n{{"name": "get_time", '
        f'"arguments": {DAYS}}}\n</tool_call>\nSo.',
        "So.",
        (PARIS, OSLO),
    ),
    "two calls and a comma": Fault(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "get_time", '
        f'"arguments": {DAYS}}}]</tool_call>',
        "]",
        (PARIS, OSLO),
    ),
    "a call and half a call between two marks": Fault(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {CITY}}} {{"name": 7}}</tool_call>',
        '{"name": 7}',
        (PARIS,),
    ),
    # Qwen3-Coder
    "no opening tag": Fault(
        "qwen3_coder",
        "I look.\n\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>",
        "I look.",
        (PARIS,),
    ),
    "no closing tags": Fault(
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</tool_call>",
        calls=(PARIS,),
    ),
    "no closing tag of a parameter": Fault(
        "qwen3_coder",
        "<tool_call><function=get_time><parameter=city>Oslo<parameter=days>3</function>"
        "</tool_call>",
        calls=(OSLO,),
    ),
    "no closing tag of a function": Fault(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></tool_call>",
        calls=(PARIS,),
    ),
    "nothing is closed before the next": Fault(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Rome\n"
        "<tool_call><function=get_time><parameter=city>Oslo</parameter>"
        "<parameter=days>3</parameter></function></tool_call>",
        "get_weather>city>Rome",
        (OSLO,),
    ),
    "an opener in a value": Fault(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>write <tool_call> "
        "here</parameter></function></tool_call>",
        calls=(("get_weather", {"city": "write <tool_call> here"}),),
    ),
    **{
        f"in a value: {inner!r}": Fault(
            "qwen3_coder",
            f"<tool_call>\n<function=get_weather>\n<parameter=city>\nsee {inner} below\n"
            "important\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
            calls=(("get_weather", {"city": f"see {inner} below\nimportant", "days": 3}),),
        )
        for inner in (
            *XML_MARKS[:5],
            "<parameter=city>",
            "<parameter=x>",
            "<parameter=\n",
            "<function=f>",
        )
    },
    "a name that is none in a value without an end": Fault(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>a <parameter=x> "
        "b<parameter=days>3</function></tool_call>",
        calls=(("get_weather", {"city": "a <parameter=x> b", "days": 3}),),
    ),
    "no closing tag of a parameter, before a call": Fault(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Paris</function>\n<tool_call>\n"
        "<function=get_time>\n<parameter=city>\nOslo\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        calls=(PARIS, OSLO),
    ),
    "names in quotes": Fault(
        "qwen3_coder",
        '<tool_call><function="get_weather"><parameter="city">Paris</parameter></function>'
        "</tool_call>",
        calls=(PARIS,),
    ),
    "JSON in a function tag": Fault(
        "qwen3_coder",
        f"<tool_call><function=get_weather>{CITY}</function></tool_call>",
        calls=(PARIS,),
    ),
    "literals of Python": Fault(
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=tags>['a', "
        "'b']</parameter><parameter=where>{'x': True, 'y': None}</parameter>"
        "<parameter=celsius>True</parameter><parameter=days>None</parameter></function>"
        "</tool_call>",
        calls=(
            (
                "get_weather",
                {
                    "tags": ["a", "b"],
                    "where": {"x": True, "y": None},
                    "celsius": True,
                    "days": None,
                },
            ),
        ),
    ),
    # Llama
    "prose after JSON": Fault(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {CITY}}}\n\nMore?',
        "More?",
        (PARIS,),
    ),
    "semicolons and lines": Fault(
        "llama3_json",
        f'Well.\n{{"name": "get_weather", "parameters": {CITY}}};\n{{"name": "get_time", '
        f'"parameters": {DAYS}}}',
        "Well.",
        (PARIS, OSLO),
    ),
    "commas": Fault(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {CITY}}}, {{"name": "get_time", "parameters": '
        f"{DAYS}}}",
        calls=(PARIS, OSLO),
    ),
    "a list": Fault(
        "llama3_json",
        f'[{{"name": "get_weather", "parameters": {CITY}}}, {{"name": "get_time", "arguments": '
        f"{DAYS}}}]",
        calls=(PARIS, OSLO),
    ),
    "a type": Fault(
        "llama3_json",
        f'{{"type": "function", "name": "get_weather", "parameters": {CITY}}}',
        calls=(PARIS,),
    ),
    "a name by another key": Fault(
        "llama3_json",
        f'{{"type": "function", "function": "get_weather", "parameters": {CITY}}}',
        calls=(PARIS,),
    ),
    "calls of Python": Fault("llama3_json", '[get_weather(city="Paris")]', calls=(PARIS,)),
    "JSON that is none": Fault(
        "llama3_json",
        'So {"a": {"b": [1, {"name": 2}]}}, or {} and [].',
        'So {"a": {"b": [1, {"name": 2}]}}, or {} and [].',
    ),
    "a function that is none": Fault(
        "llama3_json",
        'As {"name": "Bob", "parameters": {}}.',
        'As {"name": "Bob", "parameters": {}}.',
    ),
    "code for an interpreter": Fault("llama3_json", "<|python_tag|>print(1)", "print(1)"),
    "JSON from a model of Python": Fault(
        "pythonic",
        f'{{"type": "function", "name": "get_weather", "parameters": {CITY}}}',
        calls=(PARIS,),
    ),
    "constants of JSON": Fault(
        "pythonic",
        "[get_weather(celsius=true, where={'a': null})]",
        calls=(("get_weather", {"celsius": True, "where": {"a": None}}),),
    ),
    "no brackets": Fault("pythonic", 'get_weather(city="Paris")', calls=(PARIS,)),
    "no brackets around two": Fault(
        "pythonic", 'get_weather(city="Paris")\nget_time(city="Oslo", days=3)', calls=(PARIS, OSLO)
    ),
    "no brackets around the first": Fault(
        "pythonic",
        'get_weather(city="Paris"); [get_time(city="Oslo", days=3)]',
        calls=(PARIS, OSLO),
    ),
    "a call that is spoken of": Fault(
        "pythonic",
        'get_weather(city="x") is how you call it.',
        'get_weather(city="x") is how you call it.',
    ),
    "two calls that are spoken of": Fault(
        "pythonic",
        'get_weather(city="x"); get_time() are calls',
        'get_weather(city="x"); get_time() are calls',
    ),
    "a second that not all can read": Fault(
        "pythonic",
        "get_weather(city='x'); get_time(days=1e999)",
        "get_weather(city='x'); get_time(days=1e999)",
    ),
    "a call and a note": Fault(
        "pythonic", 'get_weather(city="x") [as told]', 'get_weather(city="x") [as told]'
    ),
    "a call spoken of before JSON that is none": Fault(
        "llama3_json",
        'get_weather(city="x") gives {"a": 1}',
        'get_weather(city="x") gives {"a": 1}',
    ),
    "no closing bracket": Fault("pythonic", 'Well: [get_weather(city="Paris")', "Well:", (PARIS,)),
    "no closing parenthesis": Fault("pythonic", '[get_weather(city="Paris"', calls=(PARIS,)),
    "colons": Fault("pythonic", '[get_weather(city: "Paris")]', calls=(PARIS,)),
    "a new line and a bracket in a text": Fault(
        "pythonic", "[get_weather(city='a ]\n)')]", calls=(("get_weather", {"city": "a ]\n)"}),)
    ),
    "a link": Fault(
        "pythonic",
        "See [get_weather](https://x.y) and [1](2).",
        "See [get_weather](https://x.y) and [1](2).",
    ),
    # Mistral
    "quotes of Python": Fault(
        "mistral",
        "[TOOL_CALLS][{'name': 'get_weather', 'arguments': {'city': 'Paris'}}]$$ I look.",
        "$$ I look.",
        (PARIS,),
    ),
    "an object for a list": Fault(
        "mistral", f'[TOOL_CALLS] {{"name": "get_weather", "arguments": {CITY}}}', calls=(PARIS,)
    ),
    "objects without a list": Fault(
        "mistral",
        f'[TOOL_CALLS]{{"name": "get_weather", "arguments": {CITY}}}\n{{"name": "get_time", '
        f'"arguments": {DAYS}}}',
        calls=(PARIS, OSLO),
    ),
    "a list of numbers": Fault("mistral", "[TOOL_CALLS] [1, 2]", " [1, 2]"),
    "prose after arguments": Fault(
        "mistral", f"[TOOL_CALLS]get_weather[ARGS]{CITY}\n\nI look.", "I look.", (PARIS,)
    ),
    "braces before the mark": Fault(
        "mistral", f"{{}} [TOOL_CALLS]get_weather[ARGS]{CITY}", "{}", (PARIS,)
    ),
    # DeepSeek
    "letters for marks": Fault(
        "deepseek",
        "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>get_weather\n```json\n"
        f"{CITY}\n```<|tool_call_end|><|tool_calls_end|>",
        calls=(PARIS,),
    ),
    "no mark around the calls": Fault(
        "deepseek", f"{CALL}get_weather{SEP}{CITY}{END_CALL}", calls=(PARIS,)
    ),
    "nothing between the marks": Fault("deepseek", f"Hm.{CALLS}{END_CALLS}", "Hm."),
    "a fence without its language": Fault(
        "deepseek", f"{CALL}function{SEP}get_weather\n```\n{CITY}\n```{END_CALL}", calls=(PARIS,)
    ),
    "a fence in the newer form": Fault(
        "deepseek", f"{CALL}get_weather{SEP}```json\n{CITY}\n```{END_CALL}", calls=(PARIS,)
    ),
    # Gemma
    "no word before the name": Fault(
        "gemma", '<|tool_call>:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', calls=(PARIS,)
    ),
    "nothing before the name": Fault(
        "gemma", '<|tool_call>get_weather{city:<|"|>Paris<|"|>}<tool_call|>', calls=(PARIS,)
    ),
    "prose for braces": Fault(
        "gemma",
        "<|tool_call>call:get_weather of "
        'Paris<tool_call|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        "call:get_weather of Paris",
        (PARIS,),
    ),
    "parentheses": Fault(
        "gemma", "<|tool_call>call:get_weather(city='Paris')<tool_call|>", calls=(PARIS,)
    ),
    "JSON's quotes": Fault(
        "gemma",
        '<|tool_call>call:get_weather{tags:["a",\'b\'],where:{"x": "fast"}}<tool_call|>',
        calls=(("get_weather", {"tags": ["a", "b"], "where": {"x": "fast"}}),),
    ),
    "no first quote": Fault(
        "gemma", '<|tool_call>call:get_weather{city:Paris<|"|>}<tool_call|>', calls=(PARIS,)
    ),
    "no quotes": Fault(
        "gemma", "<|tool_call>call:get_weather{city:Paris}<tool_call|>", calls=(PARIS,)
    ),
    "a number for a text": Fault(
        "gemma",
        "<|tool_call>call:get_weather{city:12345}<tool_call|>",
        calls=(("get_weather", {"city": "12345"}),),
    ),
    "Python's constants": Fault(
        "gemma",
        "<|tool_call>call:get_weather{celsius:True,days:None}<tool_call|>",
        calls=(("get_weather", {"celsius": True, "days": None}),),
    ),
    "a brace too few of its own": Fault(
        "gemma", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|><tool_call|>', calls=(PARIS,)
    ),
    # gpt-oss
    "a mark in the name": Fault(
        "harmony",
        "<|start|>assistant "
        f"to=functions.get_weather<|channel|>commentary<|message|>{CITY}<|call|>",
        calls=(PARIS,),
    ),
    "a header that is garbled": Fault(
        "harmony",
        "<|channel|>commentary?<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "Yes.",
        prompt_end="<|start|>assistant",
    ),
    "text between messages": Fault(
        "harmony",
        "<|channel|>analysis<|message|>A.<|end|>Then "
        "this.<|start|>assistant<|channel|>final<|message|>B.",
        "Then this.\n\nB.",
        reasoning="A.",
        prompt_end="<|start|>assistant",
    ),
    "no mark before the message": Fault(
        "harmony",
        "<|channel|>final It is warm.<|end|>",
        "It is warm.",
        prompt_end="<|start|>assistant",
    ),
    "no mark between messages": Fault(
        "harmony",
        "<|channel|>analysis<|message|>A.<|channel|>commentary "
        f"to=functions.get_weather<|message|>{CITY}",
        calls=(PARIS,),
        reasoning="A.",
        prompt_end="<|start|>assistant",
    ),
    "no arguments": Fault(
        "harmony", f"{HEADER}get_time<|message|><|call|>", calls=(("get_time", {}),)
    ),
    "a text after arguments": Fault(
        "harmony", f"{HEADER}get_weather<|message|>{CITY} thanks<|call|>", "thanks", (PARIS,)
    ),
    # Reasoning
    "no mark before reasoning": Fault(
        "deepseek_r1", "Hm.\n</think>\n\nFour.", "Four.", reasoning="Hm."
    ),
    "a mark before reasoning all the same": Fault(
        "deepseek_r1", "<think>\nHm.\n</think>\n\nFour.", "Four.", reasoning="Hm."
    ),
}
"""Malformed calls from servers' issue trackers, by format."""
