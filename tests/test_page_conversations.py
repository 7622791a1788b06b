"""Conversations on the page at `/`: kept, found, exported, branched."""

from __future__ import annotations

import json

import pytest
from browsing import (
    NEEDS_CHROMIUM,
    ask,
    browser,
    module,
    sent,
    served,
    set_field,
    tiny,
    visit,
)
from playwright.sync_api import Page, expect

__all__ = ["browser", "module", "served", "tiny", "visit"]
pytestmark = NEEDS_CHROMIUM


def titles(page: Page) -> list[str]:
    """The titles in the list of conversations."""
    return [
        text.split("\n")[0].strip()
        for text in page.locator("#shelf-list .title").evaluate_all(
            "all => all.map((one) => one.firstChild.textContent)"
        )
    ]


def test_conversations_are_kept_until_they_are_deleted(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    set_field(page, "temperature", "0")
    answer = ask(page, "What is the capital of France?")
    page.click("#new-chat")
    ask(page, "Hello")
    page.reload()
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    page.click("#shelf-toggle")
    expect(page.locator("#shelf-list li")).to_have_count(2)
    assert titles(page) == ["Hello", "What is the capital of France?"]
    # Answers are found, too.
    page.fill("#shelf-search", "paris CAPITAL")
    expect(page.locator("#shelf-list li")).to_have_count(1)
    page.get_by_role("button", name="Rename What is").click()
    page.fill("#shelf-list input", "<b>Capitals</b>")
    page.press("#shelf-list input", "Enter")
    expect(page.locator("#shelf-list .title")).to_contain_text("<b>Capitals</b>")
    with page.expect_download() as saved:
        page.click("#shelf-export")
    file = saved.value.path().read_bytes()
    [exported] = json.loads(file)["conversations"]
    assert [turn["text"] for turn in exported["turns"]] == [
        "What is the capital of France?",
        answer,
    ]
    page.locator("#shelf-list .title").click()
    expect(page.locator("#shelf")).to_be_hidden()
    expect(page.locator(".message.assistant .text")).to_have_text(answer)
    bodies = sent(page)
    ask(page, "And of Italy?")
    assert [message["role"] for message in bodies[0]["messages"]] == ["user", "assistant", "user"]
    page.click("#shelf-toggle")
    remove = page.get_by_role("button", name="Delete <b>Capitals")
    remove.click()
    expect(page.locator("#shelf-list li")).to_have_count(2)
    remove.click()
    expect(page.locator("#shelf-list li")).to_have_count(1)
    expect(page.locator(".message")).to_have_count(0)
    page.set_input_files(
        "#shelf-file", {"name": "a.json", "mimeType": "application/json", "buffer": file}
    )
    expect(page.locator("#shelf-list li")).to_have_count(2)
    # The switch.
    page.uncheck("#shelf-keep")
    expect(page.locator("#shelf-note")).to_contain_text("Nothing is kept")
    page.press("#shelf-search", "Escape")
    page.click("#new-chat")
    ask(page, "What is 7 + 5?")
    page.click("#shelf-toggle")
    expect(page.locator("#shelf-list li")).to_have_count(2)
    clear = page.locator("#shelf-clear")
    clear.click()
    clear.click()
    expect(page.locator("#shelf-none")).to_have_text("None yet.")


TURN = {"id": "a" * 32, "parent": None, "role": "user", "text": "Hello"}
CONVERSATION = {"id": "b" * 32, "mode": "chat", "created": 1, "changed": 2, "turns": [TURN]}
PICTURE = {"kind": "image", "name": "a", "data": "data:image/png;base64,AAAA"}


@pytest.mark.parametrize(
    ("change", "turn", "fault"),
    [
        ({"id": "../x"}, {}, "conversations[0].id"),
        ({"mode": "html"}, {}, "conversations[0].mode"),
        ({"created": "now"}, {}, "conversations[0].created"),
        ({"title": 1}, {}, "conversations[0].title"),
        ({"title": "x" * 201}, {}, "conversations[0].title"),
        ({"turns": {}}, {}, "conversations[0].turns"),
        ({"turns": [TURN] * 10_001}, {}, "conversations[0].turns"),
        ({"turns": [TURN, TURN]}, {}, "turns[1].id"),
        ({"chosen": {"root": "c" * 32}}, {}, "conversations[0].chosen"),
        ({}, {"role": "system"}, "turns[0].role"),
        ({}, {"parent": "c" * 32}, "turns[0].parent"),
        ({}, {"text": 5}, "turns[0].text"),
        ({}, {"text": "x" * (2**20 + 1)}, "turns[0].text"),
        ({}, {"facts": ["x" * 201]}, "turns[0].facts[0]"),
        ({}, {"attachments": [PICTURE] * 65}, "turns[0].attachments"),
        ({}, {"attachments": [{**PICTURE, "kind": "page"}]}, "attachments[0].kind"),
        ({}, {"attachments": [{**PICTURE, "data": "https://a.b/c"}]}, "attachments[0].data"),
        ({}, {"attachments": [{**PICTURE, "data": PICTURE["data"] + '"'}]}, "attachments[0].data"),
        ({}, {"calls": [{"id": "a", "name": "b"}]}, "calls[0].arguments"),
        ({}, {"results": [{"id": "a"}]}, "results[0].text"),
    ],
)
def test_a_faulty_import_is_refused(module, change, turn, fault):
    conversation = {**CONVERSATION, "turns": [{**TURN, **turn}], **change}
    head = {"format": "toolkit-lm-conversations", "version": 1}
    said = module("exchange", "checked", {**head, "conversations": [CONVERSATION, conversation]})
    assert fault.replace("conversations[0]", "conversations[1]") in said["error"]
    good = module("exchange", "checked", {**head, "conversations": [{**CONVERSATION, "x": 1}]})
    assert good["value"] == [{**CONVERSATION, "title": "", "chosen": {}}]
    for wrong in ({**head, "version": 2}, {"format": "x"}, [], None):
        assert "error" in module("exchange", "checked", wrong)


def test_questions_and_answers_have_branches(visit, tiny):
    page = visit(f"{tiny}/")
    set_field(page, "temperature", "0")
    first = ask(page, "What is the capital of France?")
    ask(page, "And of Italy?")
    bodies = sent(page)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("What is the capital of Spain?")
    page.get_by_role("button", name="Send as a branch").click()
    expect(page.locator(".message.user .branches").first).to_contain_text("2/2")
    answer = page.locator(".message.assistant .text")
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    assert "Madrid" in answer.inner_text()
    assert [one["content"] for one in bodies[0]["messages"]] == ["What is the capital of Spain?"]
    page.get_by_role("button", name="Previous branch").click()
    expect(answer).to_have_count(2)
    expect(answer.first).to_have_text(first)
    # An answer is cut, and goes on.
    page.click("#new-chat")
    set_field(page, "max_tokens", "3")
    begun = ask(page, "What is the capital of France?")
    set_field(page, "max_tokens", "")
    page.get_by_role("button", name="Continue").click()
    expect(answer).to_have_text(first)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()
    body = bodies[-1]
    assert body["continue_final_message"] and not body["add_generation_prompt"]
    assert body["messages"][-1] == {"role": "assistant", "content": begun}
    expect(page.locator(".message.assistant")).to_have_count(1)


def test_failed_turns_are_not_sent_again(visit, tiny):
    page = visit(f"{tiny}/", expected="400")
    ask(page, "What is the capital of France?")
    set_field(page, "top_k", "-7")
    ask(page, "And of Italy?")
    expect(page.locator(".message.assistant").nth(1)).to_contain_text("not sent again")
    set_field(page, "top_k", "")
    bodies = sent(page)
    ask(page, "And of Spain?")
    roles = [(one["role"], "Italy" in one["content"]) for one in bodies[0]["messages"]]
    assert roles == [("user", False), ("assistant", False), ("user", False)]
