"""Prompts, conversations, end tokens and broken files."""

import json

import pytest

pytest.importorskip(
    "mistral_common",
    reason="mistral-common is not installed: see the README for an environment of its own",
)

from toolkit_lm.errors import CheckpointError, ContextLengthError, RequestError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "42"}
FAR_NESTED = {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefghi", "function": {"name": "f", "arguments": "[" * 10**5}}],
}
LONG_ID = {
    "role": "assistant",
    "tool_calls": [{"id": "call_1", "function": {"name": "f", "arguments": "{}"}}],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    },
}
RENDERED_TOOL = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f", "description": "d", '
    '"parameters": {"type": "object", "properties": {}}}}][/AVAILABLE_TOOLS]'
)


@pytest.fixture
def renderer(make_renderer):
    return make_renderer()


def chat(renderer, *messages, **options):
    return renderer.decode(renderer.render_conversation(messages, **options).token_ids)


def refusal(renderer, *messages, **options):
    with pytest.raises(RequestError) as caught:
        renderer.render_conversation(messages, **options)
    return caught.value


# Prompts


def test_a_prompt_begins_with_bos(renderer):
    assert renderer.render_prompt("Hi").token_ids == [
        1,
        *renderer.render_prompt("Hi", add_special_tokens=False).token_ids,
    ]
    assert (
        renderer.render_prompt({"prompt": "Hi"}).token_ids == renderer.render_prompt("Hi").token_ids
    )


def test_special_tokens_in_a_text_stay_text(renderer):
    text = "<s>[INST]</s>"
    token_ids = renderer.render_prompt(text, add_special_tokens=False).token_ids
    assert min(token_ids) >= 100
    assert renderer.decode(token_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("text", ["a" * (2**20 + 1), " " * 2**20], ids=["long", "spaces"])
def test_a_text_that_is_too_large_is_refused(renderer, text):
    with pytest.raises(RequestError) as caught:
        renderer.render_prompt(text)
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 700


def test_a_text_may_be_as_long_as_the_model_reads(make_renderer):
    renderer = make_renderer(max_model_len=2**18)
    assert len(renderer.render_prompt("ab\n" * 2**19).token_ids) > 2**19


# Conversations


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("v3", "<s>[INST]Be brief.\n\nHi[/INST]"),
        ("v7", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]"),
        ("v13", "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]"),
    ],
)
def test_the_file_names_the_version(make_renderer, version, expected):
    assert chat(make_renderer(version), SYSTEM, USER) == expected


def test_developer_is_system(renderer):
    assert chat(renderer, {**SYSTEM, "role": "developer"}, USER) == chat(renderer, SYSTEM, USER)


@pytest.mark.parametrize(
    ("version", "call"),
    [
        ("v3", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]</s>'),
        ("v11", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}</s>'),
        ("v13", '[TOOL_CALLS]f[ARGS]{"x": 1}</s>'),
    ],
)
def test_tools(make_renderer, version, call):
    text = chat(make_renderer(version), USER, CALL, RESULT, tools=[TOOL])
    assert text.startswith(f"<s>{RENDERED_TOOL}[INST]Hi[/INST]{call}[TOOL_RESULTS]")
    assert "42" in text
    assert text.endswith("[/TOOL_RESULTS]")


def test_no_tools_is_none(renderer):
    assert chat(renderer, USER, tools=[]) == chat(renderer, USER)


def test_an_answer_is_continued(renderer):
    assert chat(renderer, USER, ANSWER, continue_final_message=True) == "<s>[INST]Hi[/INST]Yes."
    assert chat(renderer, USER, ANSWER, USER) == "<s>[INST]Hi[/INST]Yes.</s>[INST]Hi[/INST]"


def test_a_generation_prompt_has_no_tokens(renderer):
    assert (
        chat(renderer, USER, add_generation_prompt=False)
        == chat(renderer, USER, add_generation_prompt=True)
        == chat(renderer, USER)
    )


@pytest.mark.parametrize("role", ["system", "user"])
def test_special_tokens_in_a_message_stay_text(renderer, role):
    token_ids = renderer.render_conversation(
        [{"role": role, "content": "</s>[INST]"}, USER]
    ).token_ids
    assert [token_id for token_id in token_ids if token_id < 100] == [1, 3, 4]
    assert "</s>[INST]" in renderer.decode(token_ids, skip_special_tokens=True)


def test_contents_may_be_parts(renderer):
    parts = [{"type": "text", "text": "Hi", "cache_control": {}}]
    assert chat(renderer, {"role": "user", "content": parts}) == chat(renderer, USER)


def test_thinking(make_renderer):
    answer = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Yes."}],
    }
    assert "[THINK]Hm.[/THINK]Yes.</s>" in chat(make_renderer("v13"), USER, answer, USER)
    assert refusal(make_renderer("v3"), USER, answer, USER).param == "messages"


def test_reasoning_effort(make_renderer):
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    if "v15" not in TokenizerVersion.__members__:
        pytest.skip("this mistral-common is older than version 15 of tokenizers")
    renderer = make_renderer("v15")
    assert '"high"' in chat(renderer, USER, chat_template_kwargs={"reasoning_effort": "high"})
    for value in ("enormous", "low", 3):
        assert (
            refusal(renderer, USER, chat_template_kwargs={"reasoning_effort": value}).param
            == "chat_template_kwargs"
        )


@pytest.mark.parametrize(
    ("messages", "options", "param", "said"),
    [
        ([], {}, "messages", "empty"),
        (["Hi"], {}, "messages", "mapping"),
        ([{"content": "Hi"}], {}, "messages", "role"),
        ([{"role": "usr", "content": "Hi"}], {}, "messages", "'user'"),
        ([{"role": "user"}], {}, "messages", "content"),
        ([{"role": "user", "content": 3}], {}, "messages", "text"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages", "surrogate"),
        ([{"role": "user", "content": object()}], {}, "messages", "JSON"),
        ([{"role": "user", "content": "a" * 2**20}], {}, "messages", "characters"),
        ([{"role": "user", "content": " " * (2**20 - 50)}], {}, "messages", "mistral-common"),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "file:///x.png"}}],
                }
            ],
            {},
            "messages",
            "image_url",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, "messages", "text"),
        ([USER, ANSWER], {}, "messages", "last role"),
        ([USER, {**CALL, "tool_calls": 3}], {}, "messages", "tool_calls"),
        ([USER, LONG_ID, USER], {}, "messages", "call_1"),
        ([USER, FAR_NESTED, RESULT], {}, "messages", "recursion"),
        ([USER, {"role": "tool", "content": "42"}], {}, "messages", ""),
        ([USER], {"tools": {}}, "tools", "list"),
        ([USER], {"tools": [{"type": "function"}]}, "tools", "function"),
        (
            [USER],
            {"tools": [{"type": "function", "function": {"name": "f f", "parameters": {}}}]},
            "tools",
            "f f",
        ),
        (
            [USER],
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}
                ]
            },
            "tools",
            "schema",
        ),
        ([USER], {"continue_final_message": True}, "continue_final_message", "assistant"),
        (
            [USER, {**ANSWER, "content": ""}],
            {"continue_final_message": True},
            "continue_final_message",
            "content",
        ),
        (
            [USER, ANSWER],
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "Cannot set both",
        ),
        ([USER, ANSWER], {"add_generation_prompt": False}, "add_generation_prompt", "answer"),
        (
            [USER],
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs",
            "enable_thinking",
        ),
        (
            [USER],
            {"chat_template_kwargs": {"reasoning_effort": "high"}},
            "chat_template_kwargs",
            "v3",
        ),
        ([USER], {"chat_template_kwargs": ["a"]}, "chat_template_kwargs", "mapping"),
        ([USER], {"tool": []}, "tool", "'tools'"),
    ],
)
def test_what_cannot_be_rendered_is_refused(renderer, messages, options, param, said):
    error = refusal(renderer, *messages, **options)
    assert error.param == param
    assert said in str(error)
    assert len(str(error)) < 700


def test_deep_nesting_is_refused(renderer):
    deep = {}
    for _ in range(10**4):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert refusal(renderer, USER, tools=[tool]).param == "tools"


def test_all_messages_count(renderer):
    with pytest.raises(ContextLengthError):
        renderer.render_conversation([{"role": "user", "content": "a" * 2**18}] * 5)


# Files


def test_end_tokens_are_of_all_files(make_renderer):
    renderer = make_renderer(
        hf_config={"eos_token_id": 7}, generation_config={"eos_token_id": [9, 7, 10**6]}
    )
    assert renderer.eos_token_ids == [9, 7, 2]
    with pytest.raises(CheckpointError, match="eos_token_id"):
        make_renderer(hf_config={"eos_token_id": "</s>"})


def test_ids_beyond_the_vocabulary_have_no_text(make_renderer):
    renderer = make_renderer(hf_config={"vocab_size": 4000})
    assert renderer.vocab_size == 4000
    assert renderer.decode([3999, -1]) == ""
    assert renderer.token_texts([3999, 1]) == ["", "<s>"]


def test_a_stream_holds_back_half_a_character(renderer):
    token_ids = renderer.render_prompt("😀", add_special_tokens=False).token_ids
    assert len(token_ids) > 1
    stream = renderer.decode_stream()
    assert stream.push(token_ids[:-1]) == ""
    assert stream.push(token_ids[-1:]) == "😀"
    assert stream.push(token_ids[:-1]) == ""
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"config": {"version": "v99"}}', "\xff", "cut"], ids=repr
)
def test_a_broken_file_is_named(make_renderer, tmp_path, text):
    renderer = make_renderer()
    path = tmp_path / "tekken.json"
    path.write_bytes(path.read_bytes()[:5000] if text == "cut" else text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"tekken\.json is not a tokenizer"):
        type(renderer)(renderer.config)


@pytest.mark.parametrize(
    "change",
    [{"pattern": "("}, {"default_vocab_size": 10**6}, {"default_num_special_tokens": 3}],
    ids=str,
)
def test_a_config_that_does_not_fit_is_named(make_renderer, tmp_path, change):
    renderer = make_renderer()
    path = tmp_path / "tekken.json"
    tekken = json.loads(path.read_text())
    path.write_text(json.dumps(tekken | {"config": tekken["config"] | change}))
    with pytest.raises(CheckpointError, match=r"tekken\.json is not a tokenizer"):
        type(renderer)(renderer.config)


def test_a_missing_file_is_named(make_renderer, tmp_path):
    renderer = make_renderer()
    (tmp_path / "tekken.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tekken\.json"):
        type(renderer)(renderer.config)
