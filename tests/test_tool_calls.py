"""Tool calls through the whole engine: what must be called is called, in every format, and an
agent's loop goes round."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import jsonschema
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.plugin import Plugins

PARSERS = Plugins.load().parsers
BAR = "\N{FULLWIDTH VERTICAL LINE}"
LOW = "\N{LOWER ONE EIGHTH BLOCK}"
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
REFERRED = {
    "$ref": "#/$defs/Arguments",
    "$defs": {
        "Arguments": {
            **PARAMETERS,
            "properties": {
                "city": {"$ref": "#/$defs/City"},
                "unit": {"allOf": [{"$ref": "#/$defs/Unit"}]},
                "days": {"$ref": "#/$defs/Days/anyOf/0"},
            },
        },
        "City": PARAMETERS["properties"]["city"],
        "Unit": PARAMETERS["properties"]["unit"],
        "Days": {"anyOf": [PARAMETERS["properties"]["days"], {"type": "null"}]},
    },
}
"""The same, as a library writes it that names its types."""


def tools(parameters):
    return [
        {"type": "function", "function": {"name": "get_weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "stop"}},
    ]


TOOLS = tools(PARAMETERS)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float32", max_num_seqs=16) as llm:
        yield llm


def answers(llm, form, structure, prompt="Once upon a time", tools=TOOLS, **more):
    params = SamplingParams(
        n=8,
        temperature=1.5,
        seed=3,
        max_tokens=160,
        structured_outputs={"structural_tag": {"format": structure}},
        logit_bias=ending(llm),
        **more,
    )
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    assert output.error is None
    for one in output.outputs:
        parser = form.parser("", tools)
        yield (
            one,
            [parser.push(one.text), parser.finish(cut=one.finish_reason != "stop")],
            parser.calls_tools,
        )


def ending(llm):
    """Logit bias that makes it likely that a document of random tokens ends."""
    renderer = llm.engine.renderer
    ids = [
        token
        for text in ('"', "}", "\n", "<", "</")
        for token in renderer.render_prompt(text, add_special_tokens=False).token_ids
    ]
    return dict.fromkeys([*ids, *renderer.eos_token_ids], 4.0)


@pytest.mark.parametrize(
    ("parallel", "parameters"),
    [(False, PARAMETERS), (True, PARAMETERS), (False, REFERRED)],
    ids=["one", "several", "referred"],
)
@pytest.mark.parametrize("name", TEMPLATES)
def test_required_calls_are_whole_and_valid(llm, name, parallel, parameters):
    form = PARSERS.make(name.split()[0], TEMPLATES[name])
    structure = form.structure(tools(parameters), parallel=parallel)
    num_whole = 0
    for one, deltas, calls_tools in answers(llm, form, structure, tools=tools(parameters)):
        content = "".join(delta.content for delta in deltas)
        if one.finish_reason != "stop":
            assert not calls_tools or not content
            continue
        assert calls_tools and not content, one.text
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert len(calls) == 1 or parallel
        for call in calls:
            jsonschema.validate(
                json.loads(call.arguments),
                PARAMETERS if call.name == "get_weather" else {"type": "object"},
            )
        num_whole += 1
    assert num_whole or parallel, "none came to its end"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_what_begins_a_call_goes_on_as_one(llm, name):
    """A model that may write any text, and is made to begin a call."""
    form = PARSERS.make(name, TEMPLATES[name])
    structure = form.structure(TOOLS, parallel=False, required=False)
    begun = {"type": "sequence", "elements": [{"type": "const_string", "value": "Hm. "}, structure]}
    assert any("<tool_call>" not in one.text for one, _, _ in answers(llm, form, begun))
    begun["elements"][1] = {**structure, "at_least_one": True}
    num_calls = 0
    for one, deltas, _ in answers(llm, form, begun):
        called = [call.name for delta in deltas for call in delta.tool_calls]
        # One that is cut is none.
        assert called in (["get_weather"], ["stop"]) or (
            one.finish_reason == "length" and not called
        ), one.text
        num_calls += len(called)
        assert "".join(delta.content for delta in deltas) in ("Hm.", "Hm. ")
    assert num_calls
    assert PARSERS.make("harmony", "").structure(TOOLS, parallel=False, required=False) is None


def test_reasoning_comes_before_a_required_call(llm):
    tools = PARSERS.make("hermes", "<tool_call>")
    think = PARSERS.make("think", "{% if add_generation_prompt %}<think>\n{% endif %}")
    structure = think.after_reasoning(tools.structure(TOOLS, parallel=False), {})
    texts = [one.text for one, _, _ in answers(llm, tools, structure)]
    for text in texts:
        reasoning, mark, call = text.partition("</think>\n\n")
        assert not mark or call.startswith("<tool_call>"[: len(call)])
        assert "<tool_call>" not in reasoning or mark


# An agent


DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def url():
    """The address of `toolkit serve tiny-tools`."""
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "serve",
        "tiny-tools",
        "--port",
        "0",
        "--log-level",
        "error",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        found = next(
            (
                at
                for line in process.stdout
                if (at := re.search(r"Serving tiny-tools at (\S+)", line))
            ),
            None,
        )
        assert found, f"the server ended with exit code {process.wait()}"
        yield found[1]
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_the_agent_of_the_docs_goes_round_three_times(url, tmp_path):
    page = (DOCS / "tools.md").read_text(encoding="utf-8")
    script = tmp_path / "agent.py"
    script.write_text(
        re.search(r"^`agent.py`:\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1],
        encoding="utf-8",
    )
    printed = re.search(r"^prints\n\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    done = subprocess.run(
        [sys.executable, script, f"{url}/v1"], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == (printed, 0), done.stderr


def test_a_stream_of_each_turn_has_the_same_parts(url):
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    messages = [{"role": "user", "content": "What is the weather in Paris and in Tokyo?"}]
    reasons = []
    for result in ({"sky": "sunny", "degrees": 21}, {"sky": "snowy", "degrees": 3}, None):
        body = {"messages": messages, "tools": tools, "temperature": 0}
        [choice] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
        content = ""
        calls = []
        reason = None
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60
        ) as stream:
            for line in stream.iter_lines():
                for one in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    content += one["delta"].get("content") or ""
                    for call in one["delta"].get("tool_calls", ()):
                        if "id" in call:
                            calls.append({"name": call["function"]["name"], "arguments": ""})
                        calls[call["index"]]["arguments"] += call["function"]["arguments"]
                    reason = one["finish_reason"] or reason
        message = choice["message"]
        assert (content, reason) == (message["content"] or "", choice["finish_reason"])
        assert calls == [call["function"] for call in message.get("tool_calls", ())]
        reasons.append(reason)
        messages.append(message)
        if result is not None:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": message["tool_calls"][0]["id"],
                    "content": json.dumps(result),
                }
            )
    assert reasons == ["tool_calls", "tool_calls", "stop"]


def test_a_tool_that_must_be_called_is_called_by_a_model_that_would_not(url):
    tools = [{"type": "function", "function": {"name": "log", "parameters": PARAMETERS}}]
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": tools,
        "tool_choice": "required",
        "temperature": 0,
    }
    body["parallel_tool_calls"] = False
    [choice] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "log"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


def test_a_tool_that_no_call_could_be_valid_for_is_refused_by_name(url):
    days = {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}
    tool = {
        "name": "log",
        "parameters": {"type": "object", "properties": {"days": days}, "required": ["days"]},
    }
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": [{"type": "function", "function": tool}],
    }
    response = httpx.post(
        f"{url}/v1/chat/completions", json={**body, "tool_choice": "required"}, timeout=60
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools")
    assert error["message"].startswith(
        "tools: the schema cannot be used: no integer is within the bounds 3 and 4 (at "
        "#/properties/days)"
    )
