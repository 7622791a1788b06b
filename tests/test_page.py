"""The pages of a real server, in a real browser: they load nothing from elsewhere, and nothing goes
wrong in them."""

from __future__ import annotations

import base64
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest
from browsing import (
    NEEDS_CHROMIUM,
    PATIENCE,
    ask,
    browser,
    module,
    number,
    served,
    set_field,
    tiny,
    visit,
)
from faulty_server import wait_for
from PIL import Image
from playwright.sync_api import expect
from toolkit_lm_tiny.drawings import draw

__all__ = ["browser", "module", "served", "tiny", "visit"]
pytestmark = NEEDS_CHROMIUM
KEY = "SECRET-123"


def test_a_chat_and_what_the_engine_does(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#model-name")).to_have_text("tiny")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    set_field(page, "temperature", "0")
    assert ask(page, "What is the capital of France?") == "The capital of France is Paris."
    # The conversation goes along.
    assert "Rome" in ask(page, "And of Italy?")
    # The page shows what the engine has done.
    expect(page.locator("#tile-generated")).not_to_have_text("0")
    expect(page.locator("#request-counts")).to_contain_text("2 finished")
    expect(page.locator("#latency-first_token")).to_contain_text("mean of 2")
    expect(page.locator("#kv-note")).to_contain_text("room for 6,400 tokens")
    assert number(page.locator("#kv-legend").inner_text().split("cached")[1].split("empty")[0]) >= 1
    expect(page.locator("#plugins li.ok", has_text="tiny")).to_be_visible()
    expect(page.locator("#log")).to_contain_text("Ready")
    for name in ("rate", "kv", "steps", "histogram-first_token"):
        drawn = page.evaluate(
            "id => document.getElementById(id).getContext('2d').getImageData(0, 0, 300, "
            "60).data.some(Boolean)",
            name,
        )
        assert drawn, name


def test_the_view_moves_with_other_clients(visit, tiny):
    page = visit(f"{tiny}/")
    seen = threading.Event()
    expect(page.locator("#requests .none")).to_be_visible(timeout=PATIENCE)

    def write() -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "n": 2}
        while not seen.is_set():
            httpx.post(f"{tiny}/v1/completions", json=body, timeout=60).raise_for_status()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        try:
            expect(page.locator("#requests .state.running").first).to_be_visible(timeout=PATIENCE)
            expect(page.locator("#tile-running")).to_have_text("2")
            expect(page.locator("#tile-output")).not_to_have_text("0")
        finally:
            seen.set()
        writing.result()
    expect(page.locator("#tile-running")).to_have_text("0")
    expect(page.locator("#requests .none")).to_be_visible(timeout=PATIENCE)
    expect(page.locator("#tile-generated")).not_to_have_text("0")


def test_an_answer_can_be_stopped_and_asked_anew(visit, tiny):
    page = visit(f"{tiny}/")
    page.click("#mode-text")
    set_field(page, "max_tokens", "450")
    page.fill("#input", "Once upon a time")
    page.press("#input", "Enter")
    answer = page.locator(".message.assistant")
    expect(answer.locator(".given")).to_have_text("Once upon a time")
    page.click("#send")
    expect(page.locator("#send")).to_have_text("Send")
    expect(answer.get_by_role("button", name="Retry")).to_be_visible()
    answer.get_by_role("button", name="Retry").click()
    expect(page.locator(".message.assistant")).to_have_count(1)
    expect(page.locator(".message.assistant .branches")).to_contain_text("2/2")
    page.click("#new-chat")
    expect(page.locator(".empty h2")).to_be_visible()


def test_an_error_is_shown(visit, tiny):
    page = visit(f"{tiny}/", expected="400")
    set_field(page, "top_k", "-7")
    page.fill("#input", "Hello")
    page.press("#input", "Enter")
    expect(page.locator(".message .error")).to_contain_text("top_k")
    set_field(page, "top_k", "")
    assert ask(page, "Hello")


def test_text_of_a_model_stays_text(visit, tiny):
    page = visit(f"{tiny}/")
    markup = (
        '<img src=x onerror="window.bad = 1"><script>window.bad = 2</script> **strong** `<b>`\n\n'
        "```\n<i>code</i>\n```\n- one\n- two"
    )
    chunk = {"choices": [{"index": 0, "delta": {"content": markup}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    shown = ask(page, markup)
    assert '<img src=x onerror="window.bad = 1">' in shown and "<i>code</i>" in shown
    text = page.locator(".message.assistant .text")
    assert text.locator("img, script, b, i").count() == 0
    assert [text.locator(tag).count() for tag in ("strong", "pre", "li")] == [1, 1, 2]
    assert page.evaluate("window.bad") is None


def test_a_message_waits_until_the_model_is_known(visit, tiny):
    page = visit(f"{tiny}/")
    held = []
    page.route("**/ui/events", lambda route: held.append(route))
    page.reload()
    page.fill("#input", "Once upon a time")
    page.press("#input", "Enter")
    page.wait_for_timeout(200)
    assert page.input_value("#input") == "Once upon a time"
    held.pop().continue_()
    answer = page.locator(".message.assistant")
    expect(answer.get_by_role("button", name="Retry")).to_be_visible(timeout=PATIENCE)
    assert page.input_value("#input") == "" and answer.count() == 1


def test_a_picture(visit, served):
    page = visit(f"{served('tiny-vision')}/")
    expect(page.locator("#attach")).to_be_visible()
    file = io.BytesIO()
    Image.fromarray(draw(Random(2), held_out=True).pixels()).save(file, "PNG")
    page.set_input_files(
        "#file", {"name": "shapes.png", "mimeType": "image/png", "buffer": file.getvalue()}
    )
    expect(page.locator("#attached img")).to_have_attribute(
        "src", f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    )
    set_field(page, "temperature", "0")
    assert ask(page, "What is in this picture?") == "One red triangle and one blue star."
    expect(page.locator(".message.user .pictures img")).to_be_visible()
    expect(page.locator("#attached")).to_be_hidden()


def test_a_server_with_a_key(visit, served):
    url = served("tiny", "--api-key", KEY)
    page = visit(f"{url}/", expected="401")
    expect(page.locator("#key-dialog")).to_be_visible()
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    expect(page.locator("#key-error")).to_be_visible()
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    expect(page.locator("#docs-link")).to_be_hidden()
    assert ask(page, "What is the capital of France?")
    assert page.evaluate("[sessionStorage.length, Object.keys(localStorage), document.cookie]") == [
        1,
        [],
        "",
    ]
    assert KEY not in page.content()
    page.reload()
    expect(page.locator("#status-dot")).to_have_class("dot ready")


def test_a_model_that_writes_nothing(visit, served):
    page = visit(f"{served('tiny', '--runner', 'pooling')}/")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#engine")).to_be_visible()


def test_from_the_start_to_the_end_of_a_server(visit, serve):
    server = serve(FAULTY_LOADING="5")
    wait_for(lambda: server.status() is not None, 60)
    page = visit(f"{server.url}/", expected="Failed to load resource")
    expect(page.locator("#banner")).to_contain_text("The engine starts")
    # Without another visit.
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#model-name")).to_have_text("tiny")
    assert ask(page, "What is the capital of France?")
    server.process.terminate()
    server.end()
    expect(page.locator("#banner")).to_contain_text("cannot be reached")
    expect(page.locator("#status-dot")).to_have_class("dot offline")


@pytest.mark.parametrize("size", [(1400, 900), (390, 800)])
def test_it_fits_the_window(visit, tiny, size):
    width, height = size
    page = visit(f"{tiny}/", viewport={"width": width, "height": height}, color_scheme="dark")
    expect(page.locator("#model-name")).to_have_text("tiny")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    if width < 1000:
        expect(page.locator("#engine")).to_be_hidden()
        page.get_by_role("button", name="Engine").click()
        expect(page.locator("#chat")).to_be_hidden()
    expect(page.locator("#engine")).to_be_visible()
    expect(page.locator("#tile-running")).not_to_have_text("–")
    assert page.evaluate(
        "document.documentElement.scrollWidth <= innerWidth && "
        "document.documentElement.scrollHeight <= innerHeight"
    )
    page.click("#theme")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_the_description_of_the_api(visit, tiny):
    page = visit(f"{tiny}/docs")
    chat = page.locator("[id='post-/v1/chat/completions']")
    expect(chat.locator(".fields").first).to_contain_text("messages")
    chat.get_by_text("Try it").click()
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".trial pre")).to_contain_text("chat.completion")
    page.fill("#filter", "tokenize")
    expect(page.locator("#operations section")).to_have_count(2)
