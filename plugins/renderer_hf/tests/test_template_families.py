"""Each form of a conversation, through the template of each family: what transformers makes of the
form that is written in full."""

from __future__ import annotations

import pytest
from template_families import FAMILIES
from template_forms import FORMS, TOOLS, USER, around
from template_reference import SPECIAL, render, whole
from toolkit_lm.errors import RequestError
from toolkit_lm_renderer_hf.chat_template import ChatTemplate


def ours(family, messages, tools=None, **options):
    return ChatTemplate({"default": FAMILIES[family]}, SPECIAL).render(
        messages, max_length=2**20, tools=tools, **options
    )


QUICK = ("deepseek r1", "deepseek v3.1", "llama 3.1", "qwen 3", "minimax", "bare functions")
"""Families that are not slow together."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_a_form_is_written_in_full_as_by_transformers_or_refused(family, form):
    messages, tools = FORMS[form]
    expected = whole(FAMILIES[family], messages, tools, first="beside" not in form)
    if not expected:
        with pytest.raises(RequestError, match="the chat template "):
            ours(family, messages, tools)
    elif "beside" in form:
        # A content beside calls may have to be a message of its own, for the turns that follow.
        assert ours(family, messages, tools) in expected
    else:
        assert ours(family, messages, tools) == expected[0]


def test_a_null_content_brings_the_branch_of_calls_out():
    expected = (
        '<|User|>what about apples<|call|>function<|sep|>weather\n```json\n{"city": "Paris"}\n'
        "```<|output|>warm today<|outputs|>"
    )
    for form in (
        "a call",
        "a call, its content absent",
        "a call, its content empty",
        "a call with a mapping",
    ):
        assert ours("deepseek r1", *FORMS[form]).startswith(f"<s>{expected}")


@pytest.mark.parametrize(
    ("family", "form", "told", "param"),
    [
        ("chatml", "a call", r"does not write the tool calls of messages\[1\]", "messages"),
        ("chatml", "a tool", "does not write the tools of this request", "tools"),
        (
            "phi 3",
            "a result that is empty",
            r"does not write the tool calls of messages\[1\]",
            "messages",
        ),
        (
            "phi 4",
            "system later",
            r"does not write the content of messages\[2\] \(role 'system'\)",
            "messages",
        ),
        (
            "minimax",
            "a call that was cut",
            r"does not write the tool calls of messages\[1\]",
            "messages",
        ),
        ("gemma 2", "system", "refuses this conversation: System role not supported", "messages"),
    ],
)
def test_what_would_be_left_out_is_named(family, form, told, param):
    with pytest.raises(RequestError, match=told) as failure:
        ours(family, *FORMS[form])
    assert failure.value.param == param


def test_documents_that_a_template_does_not_read_are_refused():
    documents = [{"title": "a", "text": "of autumn"}]
    assert "of autumn" in ours("granite", [USER], documents=documents)
    said = (
        r"^documents: the chat template does not read them, only: add_generation_prompt, "
        r"messages\. Put their texts into a message\.$"
    )
    with pytest.raises(RequestError, match=said) as failure:
        ours("chatml", [USER], documents=documents)
    assert failure.value.param == "documents"


@pytest.mark.parametrize("reader", ["default", "tool_use"])
def test_documents_that_only_another_template_of_the_checkpoint_reads_are_refused(reader):
    template = ChatTemplate(
        {"default": FAMILIES["qwen 3"], "tool_use": FAMILIES["qwen 3"]}
        | {reader: FAMILIES["granite"]},
        SPECIAL,
    )
    for name, tools in (("default", None), ("tool_use", [TOOLS["a tool"]])):
        options = {
            "max_length": 2**20,
            "tools": tools,
            "documents": [{"title": "a", "text": "of autumn"}],
        }
        if name == reader:
            assert "of autumn" in template.render([USER], **options)
        else:
            with pytest.raises(RequestError, match="does not read them"):
                template.render([USER], **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_form_is_tried_once(family, monkeypatch):
    """The second of two equal conversations is rendered, and nothing else is."""
    template = ChatTemplate({"default": FAMILIES[family]}, SPECIAL)
    rendered = []
    run = ChatTemplate._run
    monkeypatch.setattr(
        ChatTemplate, "_run", lambda self, *given: rendered.append(given) or run(self, *given)
    )
    try:
        first = template.render(around(), max_length=2**20)
    except RequestError:
        return
    rendered.clear()
    assert template.render(around(), max_length=2**20) == first
    assert len(rendered) == 1


@pytest.mark.parametrize("answer", ["", " ", "they are"])
@pytest.mark.parametrize(
    "family", ["chatml", "llama 3.1", "qwen 3", "zephyr", "smolvlm", "gemma 3"]
)
def test_an_answer_that_is_continued_may_be_empty(family, answer):
    content = [{"type": "text", "text": answer}] if family == "smolvlm" else answer
    question = {
        "role": "user",
        "content": [{"type": "text", "text": "why"}] if family == "smolvlm" else "why",
    }
    options = {"continue_final_message": True, "add_generation_prompt": False}
    chat = [question, {"role": "assistant", "content": content}]
    expected = render(FAMILIES[family], chat, **options)
    assert expected is not None
    assert (
        ours(
            family,
            [{"role": "user", "content": "why"}, {"role": "assistant", "content": answer}],
            **options,
        )
        == expected
    )
