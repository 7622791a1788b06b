"""What the page at `/` sends: files, tools, JSON schemas, options of chat templates, models."""

from __future__ import annotations

import json

from browsing import (
    NEEDS_CHROMIUM,
    answer_with,
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


def attach(page: Page, name: str, kind: str, data: bytes) -> None:
    page.set_input_files("#file", {"name": name, "mimeType": kind, "buffer": data})


def test_text_files_go_along_and_others_are_refused_by_name(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    for name, kind, data, reason in [
        ("a.pdf", "application/pdf", b"%PDF-1.4", "a.pdf is a PDF"),
        ("a.png", "image/png", b"x", "a.png: this model sees no pictures"),
        ("a.wav", "audio/wav", b"x", "a.wav: this model hears no sound"),
        ("a.mp4", "video/mp4", b"x", "a.mp4 is a video"),
        ("a.bin", "", b"\xff\xfe", "a.bin is neither"),
        ("a.zip", "application/zip", b"a\0b", "a.zip is neither"),
        ("a.txt", "text/plain", b"x" * (2**18 + 1), "a.txt is larger than 256 KiB"),
    ]:
        attach(page, name, kind, data)
        expect(page.locator("#messages .error").last).to_contain_text(reason)
    expect(page.locator("#attached")).to_be_hidden()
    attach(page, "<b>.py", "text/x-python", "print('é')\n```\n".encode())
    attach(page, "gone.txt", "text/plain", b"gone")
    page.get_by_role("button", name="Remove gone.txt").click()
    expect(page.locator("#attached .file")).to_have_text("<b>.py")
    bodies = sent(page)
    answer_with(page, {"content": "It prints."})
    ask(page, "Explain")
    [message] = bodies[0]["messages"]
    assert message["content"] == "Explain\n\n<b>.py:\n````\nprint('é')\n```\n````"
    expect(page.locator(".message.user .file")).to_have_text("<b>.py")
    expect(page.locator("#attached")).to_be_hidden()


def test_pictures_and_sound_are_parts_of_the_question(module):
    sound = {"kind": "audio", "name": "a.wav", "data": "AAAA", "format": "wav"}
    picture = {"kind": "image", "name": "a.png", "data": "data:image/png;base64,AAAA"}
    turn = {"role": "user", "text": "What?", "attachments": [picture, sound]}
    setup = {"model": "m", "system": "Be brief.", "params": {}}
    path, body = module("request", "requestFor", {"mode": "chat"}, [turn], False, setup)["value"]
    assert path == "v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": picture["data"]}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                {"type": "text", "text": "What?"},
            ],
        },
    ]


def test_calls_of_tools_are_answered_by_hand(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    page.evaluate("import('/ui/format.js').then((one) => one.fit({ reads: ['tools'] }))")
    tool = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
    set_field(page, "Tools", json.dumps([tool]))
    bodies = sent(page)
    answer_with(
        page,
        {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"<i>Rome"}'}}]},
    )
    ask(page, "What is the weather in Rome?")
    assert bodies[0]["tools"] == [{"type": "function", "function": tool}]
    card = page.get_by_role("group", name="Call of weather")
    expect(card.locator("pre")).to_have_text('{\n  "city": "<i>Rome"\n}')
    # Nothing else is asked while the model waits.
    page.fill("#input", "Hello")
    page.press("#input", "Enter")
    expect(page.locator("#messages .error")).to_contain_text("waits for its tools")
    assert len(bodies) == 1
    answer_with(page, {"content": "It is sunny."})
    page.get_by_label("Result of weather").fill('{"sky": "clear"}')
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".message.assistant").nth(1)).to_contain_text("It is sunny.")
    call = {"id": "c1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "<i>Rome"}'}
    assert bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sky": "clear"}'},
    ]
    expect(page.get_by_role("button", name="Send results")).to_have_count(0)


def test_boxes_are_checked_before_anything_is_sent(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    names = ["tools", "reasoning_effort", "enable_thinking", "style"]
    page.evaluate("reads => import('/ui/format.js').then((one) => one.fit({ reads }))", names)
    bodies = sent(page)
    for name, text, fault in [
        ("JSON schema", "{", "this is not JSON"),
        ("JSON schema", "[]", "an object is expected"),
        ("JSON schema", '{"type": "text"}', 'the type "text" is none of'),
        ("JSON schema", '{"properties": {"a": {"type": "int"}}}', 'the type "int" is none of'),
        ("Tools", "{}", "a list is expected"),
        ("Tools", '[{"description": "x"}]', 'tool 1 has no "name"'),
        ("Tools", "[1]", "an object is expected"),
        ("Template options", "1", "an object is expected"),
    ]:
        set_field(page, name, text)
        page.fill("#input", "Hello")
        page.press("#input", "Enter")
        expect(page.locator("#messages .error").last).to_contain_text(f"{name}: {fault}")
        assert page.input_value("#input") == "Hello"
        set_field(page, name, "")
    assert bodies == []
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    set_field(page, "JSON schema", json.dumps(schema))
    set_field(page, "Template options", '{"style": "short"}')
    page.select_option('[data-name="Reasoning effort"]', "low")
    page.select_option('[data-name="enable_thinking"]', "false")
    answer_with(page, {"content": '{"a": 1}'})
    ask(page, "Hello")
    expect(page.locator(".message.assistant .about")).to_contain_text("JSON")
    [body] = bodies
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert body["reasoning_effort"] == "low"
    assert body["chat_template_kwargs"] == {"style": "short", "enable_thinking": False}
    assert "tools" not in body
    page.get_by_role("button", name="Continue").click()
    expect(page.locator("#messages .error").last).to_contain_text("is not continued")
    answer_with(page, {"content": '{"a": '})
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".message.assistant .about")).to_contain_text("not whole JSON")


def test_a_model_is_chosen_and_its_context_is_measured(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#model-pick")).to_be_hidden()
    entries = [
        {"id": "tiny", "parent": None, "max_model_len": 512},
        {"id": "<b>poet", "parent": "tiny", "max_model_len": 128, "state": "resting"},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": entries}))
    page.reload()
    expect(page.locator("#model-pick")).to_be_visible()
    options = page.locator("#model-pick option")
    assert options.all_inner_texts() == ["tiny", "<b>poet (adapter of tiny, resting)"]
    bodies = sent(page)
    answer_with(page, {"content": "A poem."}, usage={"prompt_tokens": 100, "completion_tokens": 20})
    page.select_option("#model-pick", "<b>poet")
    ask(page, "Hello")
    assert bodies[0]["model"] == "<b>poet"
    expect(page.locator("#context-text")).to_have_text("120 of 128 tokens")
    assert page.locator("#context-meter").evaluate("one => [one.value, one.max]") == [120, 128]
    page.click("#new-chat")
    expect(page.locator("#context")).to_be_hidden()
