"""Tool calls through the whole engine: what must be called is called, in every format, and an agent's loop goes round."""

from __future__ import annotations

import json

import jsonschema
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.plugin import Plugins

PARSERS = Plugins.load().parsers
BAR, LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
TEMPLATES = {
    "hermes": "<tool_call>",
    "qwen3_coder": "<function=",
    "llama3_json": "",
    "mistral": "[TOOL_CALLS]",
    "mistral new": "[TOOL_CALLS][ARGS]",
    "deepseek": "```json",
    "deepseek v3.1": "",
    "harmony": "<|channel|>",
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float32", max_num_seqs=16) as llm:
        yield llm


def answers(llm, form, structure, **more):
    params = SamplingParams(
        n=8,
        temperature=1.5,
        seed=3,
        max_tokens=160,
        structured_outputs={"structural_tag": {"format": structure}},
        logit_bias=ending(llm),
        **more,
    )
    output = llm.generate("Once upon a time", params, use_tqdm=False)[0]
    assert output.error is None
    for one in output.outputs:
        parser = form.parser("", TOOLS)
        yield one, [parser.push(one.text), parser.finish(cut=one.finish_reason != "stop")], parser.calls_tools


def ending(llm):
    """What makes it likely that a document of random tokens comes to its end."""
    renderer = llm.engine.renderer
    ids = [token for text in ('"', "}", "\n", "<", "</") for token in renderer.render_prompt(text, add_special_tokens=False).token_ids]
    return dict.fromkeys([*ids, *renderer.eos_token_ids], 4.0)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_are_whole_and_valid(llm, name, parallel):
    form = PARSERS.make(name.split()[0], TEMPLATES[name])
    structure = form.structure(TOOLS, parallel=parallel)
    num_whole = 0
    for one, deltas, calls_tools in answers(llm, form, structure):
        content = "".join(delta.content for delta in deltas)
        if one.finish_reason != "stop":
            assert not calls_tools or not content
            continue
        assert calls_tools and not content, one.text
        calls = {}
        for call in (call for delta in deltas for call in delta.tool_calls):
            calls[call.index] = (
                (calls[call.index][0], calls[call.index][1] + call.arguments) if call.name is None else (call.name, call.arguments)
            )
        assert len(calls) == 1 or parallel
        for called, arguments in calls.values():
            jsonschema.validate(json.loads(arguments), PARAMETERS if called == "get_weather" else {"type": "object"})
        num_whole += 1
    assert num_whole or parallel, "none came to its end"


def test_reasoning_comes_before_a_required_call(llm):
    tools = PARSERS.make("hermes", "<tool_call>")
    think = PARSERS.make("think", "{% if add_generation_prompt %}<think>\n{% endif %}")
    structure = think.after_reasoning(tools.structure(TOOLS, parallel=False), {})
    texts = [one.text for one, _, _ in answers(llm, tools, structure)]
    for text in texts:
        reasoning, mark, call = text.partition("</think>\n\n")
        assert not mark or call.startswith("<tool_call>"[: len(call)])
        assert "<tool_call>" not in reasoning or mark
