"""Tools and reasoning in chats: what the engine is asked, and the parts of its answers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm.outputs import CompletionOutput, Logprob, RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time."}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, TIME]}
HERMES = "<tool_call> </think> {%- if add_generation_prompt %}assistant{% endif %}"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture
def scripted(make_engine):
    """scripted(text): an engine that answers with a text, a character at a time. Without one, an
    answer that its parsers call content."""

    class Scripted(make_engine):
        def __init__(self, text, *, template=HERMES, reason="stop"):
            super().__init__()
            self.plugins = Plugins.load()
            # The routes of plugins look for their halves.
            self.processor = SimpleNamespace(parts=SimpleNamespace(by_name={}), tasks=())
            self.text = text
            self.reason = reason
            self.apps = {}
            type(self.renderer).chat_template_source = template

        async def _answer(self, known, params, options):
            is_delta = params.output_kind is RequestOutputKind.DELTA
            self.params = params
            for end in range(1, len(self.text) + 1):
                done = end == len(self.text)
                text = self.text[end - 1 : end] if is_delta else self.text[:end]
                table = (
                    None
                    if params.logprobs is None
                    else [{ord(c): Logprob(-1.5, 1, c)} for c in text]
                )
                outputs = [
                    CompletionOutput(
                        i,
                        text,
                        [ord(c) for c in text],
                        table,
                        finish_reason=self.reason if done else None,
                    )
                    for i in range(params.n)
                ]
                yield RequestOutput("id", "", known, outputs, done)

    kind = make_engine().renderer.__class__
    before = kind.chat_template_source
    yield Scripted
    kind.chat_template_source = before


async def ask(client_of, engine, body, **options):
    """Of an app with these options, which an engine has one of."""
    name = json.dumps(options, sort_keys=True)
    if name not in engine.apps:
        engine.apps[name] = create_app(engine, ServerOptions(**options))
    async with client_of(engine.apps[name]) as client:
        return await client.post(CHAT, json=body)


async def whole(client_of, engine, body=BODY, **options):
    response = await ask(client_of, engine, body, **options)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def joined(lines):
    """The message and finish reason that a stream's deltas make together."""
    message = {"role": "assistant", "content": ""}
    reason = None
    num_tokens = 0
    for line in lines:
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content", "reasoning"):
                if name in delta:
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if "id" in call:
                    assert call["index"] == len(calls)
                    calls.append(
                        {
                            "id": call["id"],
                            "type": call["type"],
                            "function": {"name": call["function"]["name"], "arguments": ""},
                        }
                    )
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            num_tokens += len(choice.get("token_ids") or ())
            reason = choice["finish_reason"] or reason
    return message, reason, num_tokens


def plain(message):
    """Without the ids, which are new each time, and with content that a stream has."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {
        **{name: value for name, value in message.items() if name not in ("refusal", "tool_calls")},
        "content": message["content"] or "",
    }, calls


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "arguments", "reason"),
    [
        (CALL, None, None, '{"city": "Paris"}', "tool_calls"),
        (f"{THOUGHT}I look.\n{CALL}", "I look.", "Hm.", '{"city": "Paris"}', "tool_calls"),
        (f"{THOUGHT}Four.", "Four.", "Hm.", None, "stop"),
        (f"<think>\nHm.\n{CALL}", None, "Hm.", '{"city": "Paris"}', "tool_calls"),
        ("<tool_call>no", "no", None, None, "stop"),
    ],
)
async def test_an_answer_comes_in_parts_streamed_or_not(
    client_of, scripted, text, content, reasoning, arguments, reason
):
    engine = scripted(text)
    choice = await whole(client_of, engine)
    message = choice["message"]
    assert (message["content"], message.get("reasoning_content"), choice["finish_reason"]) == (
        content,
        reasoning,
        reason,
    )
    assert message.get("reasoning") == reasoning
    if arguments is None:
        assert "tool_calls" not in message
    else:
        [call] = message["tool_calls"]
        assert call == {
            "id": call["id"],
            "type": "function",
            "function": {"name": "get_weather", "arguments": arguments},
        }
        assert call["id"].startswith("call_")
    streamed, streamed_reason, num_tokens = joined(
        (
            await ask(client_of, engine, {**BODY, "stream": True, "return_token_ids": True})
        ).text.splitlines()
    )
    assert plain(streamed) == plain(message)
    assert (streamed_reason, num_tokens) == (reason, len(text))


@pytest.mark.parametrize(("parallel", "num_calls"), [(True, 2), (None, 2), (False, 1)])
async def test_an_answer_has_one_call_where_more_are_not_wanted(
    client_of, scripted, parallel, num_calls
):
    body = BODY | {"parallel_tool_calls": parallel}
    choice = await whole(client_of, scripted(f"{CALL}\n{CALL}"), body)
    message = choice["message"]
    reason = choice["finish_reason"]
    assert (len(message["tool_calls"]), message["content"], reason) == (
        num_calls,
        None,
        "tool_calls",
    )
    response = await ask(client_of, scripted(f"{CALL}\n{CALL}"), body | {"stream": True})
    streamed, reason, _ = joined(response.text.splitlines())
    assert (len(streamed["tool_calls"]), streamed["content"], reason) == (
        num_calls,
        "",
        "tool_calls",
    )


async def test_a_call_that_max_tokens_cuts_is_left_out(client_of, scripted):
    engine = scripted(CALL[:60], reason="length")
    choice = await whole(client_of, engine)
    assert (choice["finish_reason"], choice["message"]) == (
        "length",
        {"role": "assistant", "content": "", "refusal": None},
    )
    streamed, reason, _ = joined(
        (await ask(client_of, engine, {**BODY, "stream": True})).text.splitlines()
    )
    assert (plain(streamed), reason) == (plain(choice["message"]), "length")


STRICT = {**BODY, "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, TIME]}
HELD = {
    "required": {**BODY, "tool_choice": "required"},
    "named": {**BODY, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "strict": STRICT,
}
"""Requests whose answers a grammar holds to whole calls."""


def pieces(response):
    """The deltas of calls in a stream."""
    lines = [
        json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")
    ]
    return [
        call
        for line in lines
        for choice in line["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]


@pytest.mark.parametrize("kind", HELD)
async def test_a_call_that_must_become_whole_streams_as_it_is_written(client_of, scripted, kind):
    engine = scripted(CALL.replace("Paris", "Paris, France"))
    whole_call = (await whole(client_of, engine, HELD[kind]))["message"]["tool_calls"][0][
        "function"
    ]
    response = await ask(client_of, engine, {**HELD[kind], "stream": True})
    streamed, reason, _ = joined(response.text.splitlines())
    assert ([call["function"] for call in streamed["tool_calls"]], reason) == (
        [whole_call],
        "tool_calls",
    )
    first, *rest = pieces(response)
    assert (
        first["function"] == {"name": "get_weather", "arguments": ""}
        and first["id"]
        and first["type"] == "function"
    )
    assert len(rest) == len(whole_call["arguments"]) and all(
        [*one] == ["index", "function"] for one in rest
    )


@pytest.mark.parametrize("kind", HELD)
async def test_a_streamed_call_that_is_cut_lacks_its_end(client_of, scripted, kind):
    engine = scripted(CALL, reason="length")
    for end in (len(CALL) - len('"Paris"}}\n</tool_call>'), len(CALL) - len("}\n</tool_call>")):
        engine.text = CALL[:end]
        response = await ask(client_of, engine, {**HELD[kind], "stream": True})
        streamed, reason, _ = joined(response.text.splitlines())
        assert (reason, streamed["content"]) == ("length", "")
        for call in streamed.get("tool_calls", ()):
            with pytest.raises(ValueError, match="line 1 column"):
                json.loads(call["function"]["arguments"])
    assert "tool_calls" not in (await whole(client_of, engine, HELD[kind]))["message"]


async def test_a_call_that_may_turn_out_to_be_none_comes_whole(client_of, scripted):
    response = await ask(client_of, scripted(CALL), {**BODY, "stream": True})
    assert [call["function"]["arguments"] for call in pieces(response)] == ['{"city": "Paris"}']


async def test_log_probabilities_stay_with_their_tokens(client_of, scripted):
    engine = scripted(f"{THOUGHT}{CALL}")
    body = {**BODY, "logprobs": True}
    assert len((await whole(client_of, engine, body))["logprobs"]["content"]) == len(engine.text)
    lines = (await ask(client_of, engine, {**body, "stream": True})).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert sum(len(chunk["logprobs"]["content"]) for chunk in chunks if chunk["logprobs"]) == len(
        engine.text
    )


async def test_without_tools_a_call_is_content_and_reasoning_may_be_left_out(client_of, scripted):
    engine = scripted(f"{THOUGHT}{CALL}")
    message = (await whole(client_of, engine, {"messages": BODY["messages"]}))["message"]
    assert (message["content"], message["reasoning_content"]) == (CALL, "Hm.")
    assert "tools" not in engine.renderer.kwargs
    message = (
        await whole(client_of, engine, {**BODY, "tool_choice": "none", "include_reasoning": False})
    )["message"]
    assert message == {"role": "assistant", "content": CALL, "refusal": None}
    assert "tools" not in engine.renderer.kwargs


async def test_the_chat_template_gets_tools_and_effort(client_of, scripted):
    engine = scripted("Hi.")
    await whole(
        client_of, engine, {**BODY, "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}
    )
    assert engine.renderer.kwargs["tools"] == [WEATHER, TIME]
    assert engine.renderer.kwargs["chat_template_kwargs"] == {"reasoning_effort": "low", "a": 1}
    await whole(client_of, engine, {**BODY, "reasoning_effort": "none"})
    assert engine.renderer.kwargs["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["get_weather", "get_time"]),
        ({"type": "function", "function": {"name": "get_time"}}, ["get_time"]),
    ],
)
async def test_a_call_that_must_come_is_a_structure(client_of, scripted, choice, names):
    engine = scripted(CALL)
    await whole(client_of, engine, {**BODY, "tool_choice": choice})
    structure = json.dumps(engine.params.structured_outputs["structural_tag"])
    assert [name for name in ("get_weather", "get_time") if f'\\"{name}\\"' in structure] == sorted(
        names, key=["get_weather", "get_time"].index
    )
    # Reasoning may come before it.
    assert "</think>" in structure
    assert engine.renderer.kwargs["tools"] == [WEATHER, TIME]


async def test_calls_of_strict_tools_follow_their_schema_unasked(client_of, scripted):
    engine = scripted(CALL)
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert (await whole(client_of, engine, {**BODY, "tools": [strict, TIME]}))[
        "finish_reason"
    ] == "tool_calls"
    found = engine.params.structured_outputs["structural_tag"]["format"]
    assert (found["type"], found["triggers"]) == ("triggered_tags", ["<tool_call>"])
    assert [tag["content"]["json_schema"] for tag in found["tags"]] == [
        PARAMETERS,
        {"type": "object"},
    ]
    await whole(client_of, engine)
    assert engine.params.structured_outputs is None


async def test_a_model_without_a_format_can_be_made_to_call(client_of, scripted):
    engine = scripted('{"name": "get_time", "parameters": {}}', template="")
    choice = await whole(client_of, engine, {**BODY, "tool_choice": "required"})
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
    response = await ask(client_of, engine, BODY, tool_call_parser="none")
    error = response.json()["error"]
    assert error["param"] == "tools" and "(tool_call_parser)" in error["message"]


async def test_structured_content_comes_after_reasoning(client_of, scripted):
    engine = scripted(f"{THOUGHT}{{}}")
    body = {"messages": BODY["messages"], "response_format": {"type": "json_object"}}
    assert (await whole(client_of, engine, body))["message"]["content"] == "{}"
    assert engine.params.structured_outputs["structural_tag"]["format"]["type"] == "or"
    assert not (engine.params.extra_args or {}).get("response_format")
    # A structure that cannot be expressed is that of the whole answer, which is content.
    asked = {"structural_tag": {"structures": [{"begin": "<a>"}], "triggers": ["<a>"]}}
    message = (
        await whole(client_of, engine, {"messages": BODY["messages"], "structured_outputs": asked})
    )["message"]
    assert message["content"] == engine.text
    assert engine.params.structured_outputs == asked


async def test_marks_that_are_special_tokens_are_kept(client_of, scripted):
    engine = scripted(
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', template="[TOOL_CALLS][ARGS]"
    )
    [call] = (await whole(client_of, engine))["message"]["tool_calls"]
    assert engine.params.skip_special_tokens is False
    assert len(call["id"]) == 9
    await whole(client_of, engine, {"messages": BODY["messages"]})
    assert engine.params.skip_special_tokens is True


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_ids_that_a_model_writes_are_those_of_its_calls(client_of, scripted, choice):
    """Templates may refer to them. One that it writes twice is of its first call."""
    marks = (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )
    first, begin, middle, end, last = marks
    calls = "".join(
        f"{begin}functions.get_time:{number}{middle}{{}}{end}" for number in ("3", "4", "4")
    )
    engine = scripted(f"{first}{calls}{last}", template=first)
    body = {**BODY, "tool_choice": choice}
    found = (await whole(client_of, engine, body))["message"]["tool_calls"]
    response = await ask(client_of, engine, {**body, "stream": True})
    streamed, _, _ = joined(response.text.splitlines())
    for said in (found, streamed["tool_calls"]):
        ids = [call["id"] for call in said]
        assert ids[:2] == ["functions.get_time:3", "functions.get_time:4"]
        assert ids[2].startswith("call_")
        assert [call["function"]["name"] for call in said] == ["get_time"] * 3


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [WEATHER, {"type": "a b"}]}, "tools", "tools[1]: its type"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools",
            "tools[0].function.name",
        ),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools", 'tools[1] must have a "function"'),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools",
            "tools[0].function.parameters",
        ),
        ({"tools": [WEATHER] * 600}, "tools", "600 tools"),
        ({"tool_choice": "any"}, "tool_choice", "one of none, auto, required"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", '"name"'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "'x', which is not among the tools",
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"tools": [{"type": "function", "function": {"name": "x"}}]},
                }
            },
            "tool_choice",
            "'x', which is not among the tools",
        ),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", '"mode"'),
        (
            {"structured_outputs": {"structural_tag": {"structures": [], "triggers": []}}},
            "structured_outputs",
            "beside tools, it must be one of",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "c", "format": {"type": "x"}}}]},
            "tools",
            "tools[0]: format must be",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "only with tools"),
    ],
)
async def test_bad_tools_are_refused_with_what_is_wrong(client_of, scripted, fields, param, words):
    response = await ask(client_of, scripted("x"), {**BODY, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert words in error["message"]


async def test_the_operator_chooses_parsers(client_of, scripted):
    engine = scripted(f"{THOUGHT}{CALL}")
    body = {"messages": BODY["messages"]}
    assert (await whole(client_of, engine, body, reasoning_parser="none"))["message"][
        "content"
    ] == engine.text
    engine = scripted("[get_time()]")
    assert (await whole(client_of, engine, tool_call_parser="pythonic"))[
        "finish_reason"
    ] == "tool_calls"
    assert (await ask(client_of, engine, BODY, tool_call_parser="none")).status_code == 400
    with pytest.raises(ConfigError, match=r"no answer parser 'hermse' is registered.*hermes"):
        create_app(engine, ServerOptions(tool_call_parser="hermse"))
    with pytest.raises(
        ConfigError, match=r"'think' finds no tool calls\. Those that do: harmony, hermes"
    ):
        create_app(engine, ServerOptions(tool_call_parser="think"))


async def test_reasoning_is_counted_streamed_or_not(client_of, scripted):
    engine = scripted(f"{THOUGHT}Four.")
    body = {"messages": BODY["messages"]}
    used = (await ask(client_of, engine, body)).json()["usage"]
    assert (used["completion_tokens"], used["completion_tokens_details"]) == (
        len(engine.text),
        {"reasoning_tokens": len("\nHm.\n")},
    )
    assert (await ask(client_of, engine, {**body, "n": 2})).json()["usage"][
        "completion_tokens_details"
    ] == {"reasoning_tokens": 10}
    stream = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    lines = [
        json.loads(line[6:])
        for line in (await ask(client_of, engine, stream)).text.splitlines()
        if line.startswith("data: {")
    ]
    counts = [line["usage"]["completion_tokens_details"]["reasoning_tokens"] for line in lines]
    assert counts == sorted(counts) and counts[-1] == 5
    async with client_of(create_app(engine)) as client:
        response = (await client.post("/v1/responses", json={"input": "hi"})).json()
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 5}
    plain = (await ask(client_of, scripted("Four.", template=""), body)).json()["usage"]
    assert "completion_tokens_details" not in plain


async def test_a_budget_is_of_the_format_that_the_operator_chose(client_of, scripted):
    engine = scripted(f"{THOUGHT}Four.")
    body = {"messages": BODY["messages"], "thinking_token_budget": 7}
    await whole(client_of, engine, body)
    assert engine.params.extra_args == {"thinking_token_budget": 7, "thinking_format": "think"}
    await whole(client_of, engine, body, reasoning_parser="mistral_think")
    assert engine.params.extra_args["thinking_format"] == "mistral_think"
    await whole(
        client_of,
        engine,
        {**body, "response_format": {"type": "json_object"}, "thinking_format": "seed_think"},
    )
    assert engine.params.extra_args == {"thinking_token_budget": 7, "thinking_format": "seed_think"}


@pytest.mark.parametrize("template", ["", HERMES])
async def test_what_max_tokens_leaves_of_a_required_call_is_no_content(
    client_of, scripted, template
):
    call = CALL if template else '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    body = {**BODY, "tool_choice": "required"}
    engine = scripted(call, template=template, reason="length")
    for end in (2, 8, 12, 20, 30, len(call) - 1):
        engine.text = call[:end]
        choice = await whole(client_of, engine, body)
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("length", "")
        streamed, reason, _ = joined(
            (await ask(client_of, engine, {**body, "stream": True})).text.splitlines()
        )
        message, begun = plain(streamed)
        are_whole = [call for call in begun if call["arguments"].endswith("}")]
        assert (message, are_whole, reason) == (*plain(choice["message"]), "length")
