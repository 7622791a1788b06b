"""Which format is chosen for a chat template, and what an answer must be where tools must be
called."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from toolkit_lm.plugin import Plugins

PARSERS = Plugins.load().parsers
BAR = "\N{FULLWIDTH VERTICAL LINE}"
LOW = "\N{LOWER ONE EIGHTH BLOCK}"
THINK = "{%- if '</think>' in content %}{% endif %}"
TEMPLATES = {
    "plain": ("{{ messages[0].content }}", None, None),
    "qwen2.5": (
        (
            "return a json object within <tool_call></tool_call> XML tags: {{ "
            '\'<tool_call>\\n{"name": "\' }}'
        ),
        "hermes",
        None,
    ),
    "qwen3": (f"<tool_call> {THINK}", "hermes", "think"),
    "qwen3-coder": (
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
        "qwen3_coder",
        None,
    ),
    "llama3.1": (
        'Environment: ipython {"name": function name, "parameters": dictionary}',
        "llama3_json",
        None,
    ),
    "llama3.2-pythonic": (
        "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
        "pythonic",
        None,
    ),
    "mistral": ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral", None),
    "magistral": ("[TOOL_CALLS][ARGS][THINK][/THINK]", "mistral", "mistral_think"),
    "deepseek-v3.1": (
        f"<{BAR}tool{LOW}calls{LOW}begin{BAR}><{BAR}tool{LOW}call{LOW}begin{BAR}> {THINK}",
        "deepseek",
        "think",
    ),
    "gemma4": (
        "<|tool_call>call: <tool_call|> <|channel>thought <channel|>",
        "gemma",
        "gemma_think",
    ),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    "seed": ("</seed:think>", None, "seed_think"),
    "glm": (f"<tool_call>{{name}}\n<arg_key> {THINK}", "glm", "think"),
    "apertus": ("<|tools_prefix|> <|inner_prefix|><|inner_suffix|>", "apertus", "apertus_think"),
    "command-a": ("<|START_ACTION|><|START_RESPONSE|><|END_THINKING|>", "cohere", "cohere_think"),
    "deepseek-v3.2": (f"<{BAR}DSML{BAR}function_calls> {THINK}", "deepseek_v32", "think"),
    "deepseek-v4": (f"<{BAR}DSML{BAR}tool_calls> {THINK}", "deepseek_v4", "think"),
    "ernie4.5": (f"<tool_call> {THINK} <response>", "hermes", "response_think"),
    "functionary-3.1": ("<function=example_function_name>{}</function>", "function_tag", None),
    "functionary-3.2": (">>>all\n", "functionary", None),
    "gigachat3": ("function call<|role_sep|>\n", "gigachat", None),
    "granite3": ("write <|tool_call|> followed by a JSON list", "granite", None),
    "granite-20b": ("<function_call> ", "granite_code", None),
    "granite4": ("within <tool_call></tool_call> XML tags", "hermes", None),
    "hunyuan-a13b": (f"<tool_calls> {THINK} <answer>", "hunyuan", "answer_think"),
    "hunyuan3": ("<tool_calls><tool_call>f<tool_sep><arg_key>", "hunyuan_v3", None),
    "internlm3": ("<|action_start|><|plugin|>", "internlm", None),
    "jamba": ("<tool_calls>[{}]</tool_calls>", "hunyuan", None),
    "kimi-k2": ("<|tool_calls_section_begin|>", "kimi_k2", None),
    "kimi-k3": (
        "<|open|>tools<|sep|><|open|>response<|sep|><|close|>think<|sep|>",
        "kimi_k3",
        "kimi_think",
    ),
    "lfm2": ("<|tool_call_start|>", "lfm2", None),
    "longcat": ("<longcat_tool_call>", "longcat", None),
    "minicpm5": ('<function name="f"><param name="a">', "minicpm", None),
    "minimax-m1": ("<begin_of_document><tool_calls>", "minimax_m1", None),
    "minimax-m2": (f"<minimax:tool_call> {THINK}", "minimax", "think"),
    "nemotron-nano-2": (f"<TOOLCALL>[{{}}]</TOOLCALL> {THINK}", "nemotron", "think"),
    "olmo3": ("<function_calls>", "olmo3", None),
    "phi4-mini": ("<|tool|>{{ tools }}<|/tool|>", "phi4_mini", None),
    "qwen3.5": (f"<tool_call>\n<function=f>\n<parameter=a> {THINK}", "qwen3_coder", "think"),
    "seed-oss": ("<seed:tool_call><function=f><parameter=a></seed:think>", "seed", "seed_think"),
    "step3": ("<steptml:invoke name=", "step3", None),
    "minimax-m3": ("]<]minimax[>[<tool_call> <mm:think></mm:think>", "minimax_m3", "minimax_think"),
    "inkling": ("<|message_model|><|content_text|>", "inkling", "inkling"),
    "solar-open-2": ("<|tool_call:start|> <|think:end|>", "solar", "solar_think"),
    "laguna": (f"<tool_call>f<arg_key> {THINK}", "glm", "think"),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "g"}},
]


def chosen(template: str, what: str) -> str | None:
    entries = sorted(
        (entry for entry in PARSERS.entries() if what in PARSERS.load(entry.key).finds),
        key=lambda entry: -entry.priority,
    )
    return next((entry.key for entry in entries if PARSERS.ask(entry.key, template) is None), None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_chosen_by_the_template(name):
    template, calls, reasoning = TEMPLATES[name]
    assert (chosen(template, "tool_calls"), chosen(template, "reasoning")) == (calls, reasoning)


@pytest.mark.parametrize("name", PARSERS)
def test_a_structure_names_each_function(name):
    structure = PARSERS.make(name, "").structure(TOOLS, parallel=True)
    if structure is not None:
        text = json.dumps(structure, ensure_ascii=False)
        marks = (
            '\\"',
            "=",
            ".",
            "]",
            f"sep{BAR}>",
            '"const": "',
            f"begin{BAR}>",
            "call:",
            '"begin": "',
            ">",
        )
        assert all(any(f"{mark}{function}" in text for mark in marks) for function in "fg")


@pytest.mark.parametrize(
    "properties",
    [
        {"a": {"enum": 5, "type": 7, "anyOf": 3}},
        {"a": {"enum": []}},
        {"a": 4},
        {"a": {"enum": ["x", 1]}},
        {"a": {"type": ["string", None]}},
        3,
    ],
)
def test_a_schema_that_is_none_is_no_error(properties):
    function = {
        "name": "f",
        "parameters": {"type": "object", "properties": properties, "required": 3},
    }
    form = PARSERS.make("qwen3_coder", "")
    assert form.structure([{"type": "function", "function": function}], parallel=False)
    parser = form.parser("", [{"type": "function", "function": function}])
    deltas = [
        parser.push("<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"),
        parser.finish(cut=False),
    ]
    assert parser.calls_tools and json.loads(
        "".join(call.arguments for one in deltas for call in one.tool_calls)
    ).keys() == {"a"}


def test_reasoning_may_come_before_a_structure():
    structure = {"type": "const_string", "value": "x"}
    hybrid = (
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% if not enable_thinking "
        "%}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    always = "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    optional = PARSERS.make("think", hybrid).after_reasoning(structure, {})
    assert optional["type"] == "or" and optional["elements"][1] == structure
    assert (
        PARSERS.make("think", hybrid).after_reasoning(structure, {"enable_thinking": False})
        == structure
    )
    begun = PARSERS.make("think", always).after_reasoning(structure, {})
    assert begun["type"] == "sequence" and begun["elements"][0]["begin"] == ""


def test_the_formats_load_neither_torch_nor_transformers():
    modules = sorted({entry.target.partition(":")[0] for entry in PARSERS.entries()})
    code = (
        f"import sys, {', '.join(modules)}; assert not {{'torch', 'transformers', 'llguidance'}} "
        "& sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
