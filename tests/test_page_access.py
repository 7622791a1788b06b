"""The page at `/` for keyboards, screen readers, touch and any size of window."""

from __future__ import annotations

import json

import pytest
from browsing import NEEDS_CHROMIUM, answer_with, ask, browser, served, set_field, tiny, visit
from playwright.sync_api import Page, expect

pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
from axe_playwright_python.sync_playwright import Axe

__all__ = ["browser", "served", "tiny", "visit"]
pytestmark = NEEDS_CHROMIUM
ANSWER = """# Cities

| city | people |
|:--|--:|
| [Rome](https://rome.example) | `2.7` |

- one
  1. two

> quoted

```python
def f():  # note
    return "text", 12
```

$x^2$ and \\undefined
"""


def violations(page: Page) -> list[str]:
    """Faults that axe finds, with the elements."""
    found = Axe().run(page).response["violations"]
    return [
        f"{fault['id']}: {node['html'][:160]} {node.get('any', [{}])[:1]}"
        for fault in found
        for node in fault["nodes"]
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_axe_finds_no_fault(visit, tiny, width, scheme):
    page = visit(f"{tiny}/", viewport={"width": width, "height": 900}, color_scheme=scheme)
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    found = {"empty": violations(page)}
    call = {"index": 0, "id": "c", "function": {"name": "weather", "arguments": '{"a": 1}'}}
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    answer_with(page, {"reasoning_content": "Hm."}, {"content": ANSWER}, usage=usage)
    ask(page, "Tell me")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".message.assistant .branches")).to_contain_text("2/2")
    answer_with(page, {"tool_calls": [call]})
    ask(page, "And the weather?")
    found["chat"] = violations(page)
    set_field(page, "JSON schema", "{")
    found["settings"] = violations(page)
    page.click("#settings-toggle")
    page.click("#shelf-toggle")
    expect(page.locator("#shelf-list li")).to_have_count(1)
    page.locator("#shelf-clear").click()
    found["shelf"] = violations(page)
    page.press("#shelf-search", "Escape")
    if width < 1000:
        page.get_by_role("button", name="Engine").click()
        found["engine"] = violations(page)
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_all_is_reached_by_the_keyboard_in_order(visit, tiny):
    page = visit(f"{tiny}/", viewport={"width": 1280, "height": 900})
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    answer_with(page, {"content": "Hello."})
    ask(page, "Hello")
    page.focus("#docs-link")
    seen = []
    for _ in range(20):
        page.keyboard.press("Tab")
        name, ring = page.evaluate(
            """() => {
                const one = document.activeElement;
                const name = one.id || one.getAttribute("aria-label") || one.textContent;
                return [name, getComputedStyle(one).outlineStyle];
            }"""
        )
        seen.append(name)
        # The box around the input has a ring of its own.
        assert ring != "none" or name == "input", name
        if name == "input":
            break
    order = ["theme", "mode-chat", "mode-text", "shelf-toggle", "settings-toggle"]
    order += ["new-chat", "messages", "Edit", "Copy", "Retry", "Continue", "attach", "input"]
    assert [name for name in seen if name in order] == order
    page.focus("#shelf-toggle")
    page.keyboard.press("Enter")
    expect(page.locator("#shelf-search")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#shelf-toggle")).to_be_focused()
    # A screen reader hears an answer once, when it is whole.
    expect(page.locator("#announcer")).to_have_text("Hello.")
    assert page.locator("#messages").get_attribute("aria-live") == "off"


def test_a_telephone(visit, tiny):
    options = {"has_touch": True, "is_mobile": True}
    page = visit(f"{tiny}/", viewport={"width": 390, "height": 800}, **options)
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    expect(page.locator("#hint-keys")).to_have_text("Enter begins a line.")
    answer_with(page, {"content": "Hello."})
    page.focus("#input")
    page.keyboard.type("one")
    page.keyboard.press("Enter")
    page.keyboard.type("two")
    assert page.input_value("#input") == "one\ntwo"
    assert page.locator("#input").evaluate("one => one.clientHeight") > 40
    page.tap("#send")
    expect(page.locator(".message.user .text")).to_have_text("one\ntwo")
    page.tap("#settings-toggle")
    slider = page.locator('[data-name="temperature"]')
    output = page.locator("#settings output").first
    slider.evaluate("one => { one.value = 0.4; one.dispatchEvent(new Event('input')); }")
    expect(output).to_have_text("0.40")
    # Two taps, however slow the machine.
    tap = "new PointerEvent('pointerup', { pointerType: 'touch' })"
    slider.evaluate(f"one => {{ one.dispatchEvent({tap}); one.dispatchEvent({tap}); }}")
    expect(output).to_have_text("default")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_copying_needs_no_clipboard_api(visit, tiny):
    page = visit(f"{tiny}/")
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    answer_with(page, {"content": "some `text`"})
    ask(page, "Hello")
    page.evaluate(
        """() => {
            Object.defineProperty(navigator, "clipboard", { value: undefined });
            document.execCommand = (name) => {
                window.copied = [name, document.activeElement.value];
                return window.allowed;
            };
            window.allowed = true;
        }"""
    )
    button = page.get_by_role("button", name="Copy")
    button.click()
    expect(page.locator("#announcer")).to_have_text("Copied")
    assert page.evaluate("window.copied") == ["copy", "some `text`"]
    expect(button).to_be_focused()
    page.evaluate("window.allowed = false")
    button.click()
    expect(page.locator("#announcer")).to_have_text("The browser refused")


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_tiles_and_axes_are_whole(visit, tiny, width):
    page = visit(f"{tiny}/", viewport={"width": width, "height": 900})
    if width < 1000:
        page.get_by_role("button", name="Engine").click()
    expect(page.locator("#tile-running")).not_to_have_text("–")
    cut = page.locator(".tile").evaluate_all(
        "all => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.innerText)"
    )
    assert cut == []
    labels = page.evaluate(
        """async () => {
            const charts = await import("/ui/charts.js");
            const { count, duration } = await import("/ui/dom.js");
            const fill = CanvasRenderingContext2D.prototype.fillText;
            const all = [];
            let texts = [];
            CanvasRenderingContext2D.prototype.fillText = (text) => texts.push(text);
            const canvas = document.getElementById("rate");
            for (const top of [0, 0.01, 0.3, 1, 2.2, 4.6, 7, 40, 460, 9900, 1e5, 4.4e6]) {
                texts = [];
                charts.lines(canvas, [{ values: [0, top], colour: "used" }], 10, count);
                all.push(texts);
                texts = [];
                charts.bars(canvas, [{ value: top }], 10, (ms) => duration(ms / 1000));
                all.push(texts);
            }
            CanvasRenderingContext2D.prototype.fillText = fill;
            return all;
        }"""
    )
    assert [texts for texts in labels if len(set(texts)) < len(texts)] == []
    assert all(labels), json.dumps(labels)
