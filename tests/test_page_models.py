"""The page of a server of several models: their states, their memory, and the buttons that load and
unload them."""

from __future__ import annotations

import json

import pytest
from browsing import NEEDS_CHROMIUM, ask, browser, served, visit
from playwright.sync_api import Page, expect

pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed")
from test_page_access import violations

__all__ = ["browser", "served", "visit"]
pytestmark = NEEDS_CHROMIUM
OPTIONS = {"num_kv_blocks": 64, "max_num_seqs": 2}
MODELS = [
    {"name": "tiny", "aliases": ["gpt-4o"]},
    {"name": "dates", "checkpoint": "tiny-dates"},
    {"name": "vectors", "checkpoint": "tiny", "options": {**OPTIONS, "convert": "embed"}},
    {"name": "broken", "checkpoint": "nowhere"},
]


@pytest.fixture(scope="module")
def several(served, tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("models") / "models.yaml"
    (file.parent / "nowhere").mkdir()
    (file.parent / "nowhere" / "config.json").write_text("{}")
    MODELS[3]["checkpoint"] = str(file.parent / "nowhere")
    file.write_text(json.dumps({"models": [{"options": OPTIONS, **entry} for entry in MODELS]}))
    return served("--models", str(file), "--models-memory", "3GiB", "--admin-routes")


def row(page: Page, name: str):
    return page.locator("#models tr", has=page.locator("td:first-child", has_text=name))


def state(page: Page, name: str, text: str) -> None:
    expect(row(page, name).locator(".state")).to_have_text(text)


def test_models_are_loaded_asked_and_unloaded(visit, several):
    page = visit(f"{several}/", viewport={"width": 1280, "height": 900})
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    expect(page.locator("#model-name")).to_have_text("tiny")
    expect(page.locator("#model-facts")).to_contain_text("and 3 other models")
    # Figures of one engine are not shown.
    expect(page.locator("#tiles")).to_be_hidden()
    expect(page.locator("#models tr")).to_have_count(4)
    expect(page.locator("#memory-text")).to_contain_text("0 MiB of 3.0 GiB are taken")
    # Models that write no text cannot be chosen.
    options = page.locator("#model-pick option")
    expect(options).to_have_count(4)
    names = [option.get_attribute("value") for option in options.all()]
    assert names == ["tiny", "gpt-4o", "dates", "broken"]
    expect(options.nth(1)).to_have_text("gpt-4o (alias of tiny, cold)")
    page.get_by_role("button", name="Load dates", exact=True).click()
    state(page, "dates", "ready")
    expect(options.nth(2)).to_have_text("dates (ready)")
    expect(page.locator("#announcer")).to_have_text("dates is loaded.")
    expect(page.locator("#memory span")).to_have_count(1)
    taken = page.locator("#memory-text").inner_text()
    assert "dates" in taken and not taken.startswith("0 MiB")
    # A request loads the model that is chosen.
    state(page, "tiny", "cold")
    assert ask(page, "What is the capital of France?")
    state(page, "tiny", "ready")
    expect(page.locator("#memory span")).to_have_count(2)
    button = page.get_by_role("button", name="Unload dates", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    state(page, "dates", "cold")
    # The button is the same one, and keeps the focus.
    expect(page.get_by_role("button", name="Load dates", exact=True)).to_be_enabled()
    expect(page.locator("#memory span")).to_have_count(1)
    expect(row(page, "dates").locator("td").nth(5)).to_have_text("1")


def test_an_error_of_a_model_is_shown(visit, several):
    page = visit(f"{several}/", expected="503")
    page.get_by_role("button", name="Load broken", exact=True).click()
    expect(page.locator("#models-error")).to_contain_text("'broken' has failed")
    state(page, "broken", "failed")
    assert row(page, "broken").locator(".state").get_attribute("title")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_axe_finds_no_fault(visit, several, width, scheme):
    page = visit(f"{several}/", viewport={"width": width, "height": 900}, color_scheme=scheme)
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    if width < 1000:
        page.get_by_role("button", name="Engine").click()
    expect(page.locator("#models tr")).to_have_count(4)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
