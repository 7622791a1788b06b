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
from toolkit_lm_parsers.families import FunctionaryFormat

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
    # One of each kind of layout that states a family's format.
    **dict.fromkeys(
        (
            "pythonic",
            "apertus",
            "cohere",
            "deepseek_v4",
            "functionary",
            "glm",
            "hunyuan_v3",
            "inkling",
            "kimi_k2",
            "kimi_k3",
            "longcat",
            "minicpm",
            "minimax_m3",
            "olmo3",
            "seed",
            "step3",
        ),
        "",
    ),
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
        parser = form.parser(">>>" if isinstance(form, FunctionaryFormat) else "", tools)
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


@pytest.mark.parametrize(
    "name",
    ["hermes", "qwen3_coder", "llama3_json", "mistral new", "deepseek", "glm", "kimi_k2", "lfm2"],
)
def test_what_begins_a_call_goes_on_as_one(llm, name):
    """A model that may write any text, and is made to begin a call."""
    form = PARSERS.make(name.split()[0], TEMPLATES.get(name, ""))
    structure = form.structure(TOOLS, parallel=False, required=False)
    begun = {"type": "sequence", "elements": [{"type": "const_string", "value": "Hm. "}, structure]}
    [mark] = structure["triggers"]
    assert any(mark not in one.text for one, _, _ in answers(llm, form, begun))
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


# Structured output with tools


CHAT = "/v1/chat/completions"
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = {
    "type": "object",
    "properties": {"sky": {"type": "string", "maxLength": 8}, "degrees": {"enum": [3, 21]}},
    "required": ["sky", "degrees"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER, "strict": True}}


def ask(url, body, path=CHAT):
    """The choice of an answer, which a stream has, too."""
    body = {"temperature": 0, "max_tokens": 120, **body}
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    content = ""
    calls = {}
    reason = None
    with httpx.stream("POST", f"{url}{path}", json={**body, "stream": True}, timeout=60) as stream:
        for line in stream.iter_lines():
            for one in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                content += one["delta"].get("content") or ""
                for call in one["delta"].get("tool_calls", ()):
                    kind = call.get("type", "function")
                    known = calls.setdefault(call["index"], {**call[kind], "arguments": ""})
                    known["arguments"] += call[kind].get("arguments", "")
                reason = one["finish_reason"] or reason
    message = choice["message"]
    assert (content, reason) == (message["content"] or "", choice["finish_reason"])
    told = [{"arguments": "", **call[call["type"]]} for call in message.get("tool_calls", ())]
    assert [*calls.values()] == told
    return choice


def test_an_answer_is_a_call_or_the_json(url):
    """An agent's loop, whose answer has a schema: the tool is called, then the JSON is written."""
    body = {"messages": [QUESTION], "tools": [TOOL], "response_format": FORMAT}
    choice = ask(url, body)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": '{"sky": "sunny"}'}
    # A model this small has learned to begin with words: it is pushed to the document.
    body["logit_bias"] = bias_of(url, "{")
    choice = ask(url, {**body, "messages": [QUESTION, choice["message"], result]})
    assert "tool_calls" not in choice["message"]
    assert json.loads(choice["message"]["content"]).keys() == {"sky", "degrees"}
    choice = ask(url, {**body, "messages": [{"role": "user", "content": "Hello!"}]})
    jsonschema.validate(json.loads(choice["message"]["content"]), ANSWER)


def test_a_call_that_must_come_does_whatever_content_would_be(url):
    body = {"messages": [QUESTION], "tools": [TOOL], "response_format": FORMAT}
    assert ask(url, {**body, "tool_choice": "required"})["finish_reason"] == "tool_calls"


def test_content_beside_tools_may_have_marks_of_calls(url):
    """What begins like no call is content, and all of it."""
    text = '<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>'
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": [TOOL],
        "structured_outputs": {"choice": [f"Write {text}", f'"{text}"']},
        "logit_bias": bias_of(url, "Write"),
    }
    assert text in ask(url, body)["message"]["content"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(url, mode):
    other = {"type": "function", "function": {**WEATHER, "name": "get_time"}}
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    body = {"messages": [QUESTION], "tools": [TOOL, other], "tool_choice": choice}
    message = ask(url, body)["message"]
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    assert set(names) <= {"get_time"} and (names or mode == "auto")


PATCH = """start: "*** Begin" LF line+ "*** End"
line: ("+" | "-") /[a-z"]{1,4}/ LF
%import common.LF
"""


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"syntax": "lark", "definition": PATCH}, r'\*\*\* Begin\n([+-][a-z"]{1,4}\n)+\*\*\* End'),
        ({"syntax": "regex", "definition": "[a-c]{3}-\\d"}, r"[a-c]{3}-[0-9]"),
        (None, r"[^\0]*"),
    ],
    ids=["lark", "regex", "text"],
)
def test_custom_tools_are_called_with_texts(url, form, pattern):
    custom = {"name": "edit"} | (
        {} if form is None else {"format": {"type": "grammar", "grammar": form}}
    )
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "tools": [{"type": "custom", "custom": custom}],
        "tool_choice": {"type": "custom", "custom": {"name": "edit"}},
        "temperature": 0.8,
        "seed": 5,
        "logit_bias": {},
    }
    choice = ask(url, body)
    if choice["finish_reason"] == "length":
        assert "tool_calls" not in choice["message"] and form is None
        return
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "edit")
    assert re.fullmatch(pattern, call["custom"]["input"])
    # And on: with the call in the conversation, and its result.
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    ask(url, {**body, "messages": [*body["messages"], choice["message"], result]})


def test_a_response_has_calls_of_custom_tools(url):
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}
    body = {
        "input": "Hello!",
        "tools": [{"type": "custom", "name": "edit", "format": form}, {"type": "web_search"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    response = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
    [item] = response.json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "edit")
    assert re.fullmatch("[a-c]{3}", item["input"])
    assert response.headers["x-ignored-fields"] == "tools.web_search"
    with httpx.stream(
        "POST", f"{url}/v1/responses", json={**body, "stream": True}, timeout=60
    ) as stream:
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    deltas = [
        event["delta"]
        for event in events
        if event["type"] == "response.custom_tool_call_input.delta"
    ]
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done["input"] == item["input"]
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}
    again = {**body, "input": [item, output], "tool_choice": "auto"}
    assert httpx.post(f"{url}/v1/responses", json=again, timeout=60).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (CHAT, {"messages": [QUESTION], "tools": [{"type": "mcp"}, TOOL]}, "mcp"),
        (
            "/v1/messages",
            {
                "messages": [QUESTION],
                "max_tokens": 60,
                "tools": [
                    {"type": "web_search_20250305", "name": "web_search"},
                    {"name": "get_weather", "input_schema": WEATHER["parameters"]},
                ],
            },
            "web_search_20250305",
        ),
    ],
)
def test_a_tool_that_a_vendor_runs_is_left_out(url, path, body, kind):
    response = httpx.post(f"{url}{path}", json={**body, "temperature": 0}, timeout=60)
    assert response.status_code == 200 and "get_weather" in response.text
    assert response.headers["x-ignored-fields"] == f"tools.{kind}"


@pytest.mark.parametrize("strict", [True, False])
def test_strict_closes_objects(url, strict):
    """By a document with another property, which a grammar allows or not."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text = '{"a": 1, "b": 2}'
    structure = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
    body = {
        "messages": [{"role": "user", "content": f"Repeat: {text}"}],
        "response_format": structure,
        "logit_bias": bias_of(url, text),
    }
    keys = json.loads(ask(url, body)["message"]["content"]).keys()
    assert keys <= {"a"} if strict else keys
    tool = {"name": "f", "parameters": schema, "strict": strict}
    body |= {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    del body["response_format"]
    body["parallel_tool_calls"] = False
    [call] = ask(url, body)["message"]["tool_calls"]
    keys = json.loads(call["function"]["arguments"]).keys()
    assert keys <= {"a"} if strict else keys


def bias_of(url, text):
    """Logit bias toward the tokens of a text."""
    tokens = httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]
    return {str(token): 30 for token in tokens}
