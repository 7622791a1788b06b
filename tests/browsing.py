"""A real server and a real browser, for the tests of the pages: fixtures, and what a user does."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Page, expect, sync_playwright

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
NEEDS_CHROMIUM = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium"
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
"""Hosts that the browser itself would ask in the network."""
PATIENCE = 60_000
"""Milliseconds, on a machine that does other things too."""
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        one = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS + QUIET)
        yield one
        one.close()


@pytest.fixture(scope="module")
def served():
    """served(model, *flags): the address of `toolkit serve`."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        command = [
            sys.executable,
            "-c",
            "from toolkit_lm_cli import main; main()",
            "serve",
            *arguments,
            "--port",
            "0",
            "--device",
            "cpu",
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes.append(
            process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        )
        found = next(
            (at for line in process.stdout if (at := re.search(r"Serving .+ at (\S+)", line))),
            None,
        )
        assert found, f"the server ended with exit code {process.wait()}"
        return found[1]

    yield start
    for process in processes:
        process.terminate()
        process.wait(30)
        process.stdout.close()


@pytest.fixture(scope="module")
def tiny(served) -> str:
    return served("tiny", "--num-kv-blocks", "400")


@pytest.fixture
def visit(browser) -> Iterator:
    """visit(url): a page there. At the end, it has had no errors and has asked no other host."""
    pages = []
    wrong = []

    def go(url: str, *, expected: str = "", **options: object) -> Page:
        """`expected`: what the console may say is wrong."""
        context = browser.new_context(**options)
        context.set_default_timeout(PATIENCE)
        page = context.new_page()
        pages.append(page)
        host = "/".join(url.split("/")[:3])
        page.on(
            "request",
            lambda request: (
                request.url.startswith((f"{host}/", "data:", "blob:")) or wrong.append(request.url)
            ),
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))

        def said(message) -> None:
            if message.type in ("error", "warning") and not (expected and expected in message.text):
                wrong.append(message.text)

        page.on("console", said)
        page.goto(url)
        return page

    yield go
    for page in pages:
        page.context.close()
    assert not wrong


@pytest.fixture(scope="module")
def module(browser, tiny):
    """module(name, function, *arguments): {value} or {error} of a function in a file of the
    page."""
    page = browser.new_page()
    page.goto(f"{tiny}/")

    def call(name: str, function: str, *arguments: object) -> dict:
        return page.evaluate(
            """async ([name, fn, ...all]) => {
                const module = await import(`/ui/${name}.js`);
                try { return { value: await module[fn](...all) }; }
                catch (error) { return { error: error.message }; }
            }""",
            [name, function, *arguments],
        )

    yield call
    page.close()


def ask(page: Page, text: str) -> str:
    """The answer to a message."""
    count = page.locator(".message.assistant").count()
    page.fill("#input", text)
    page.press("#input", "Enter")
    answer = page.locator(".message.assistant").nth(count)
    expect(answer.get_by_role("button", name="Retry")).to_be_visible(timeout=PATIENCE)
    return answer.locator(".text").inner_text()


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text) or 0)


def set_field(page: Page, name: str, value: str) -> None:
    if page.locator("#settings").is_hidden():
        page.click("#settings-toggle")
    page.fill(f'#settings [data-name="{name}"]', value)


def sent(page: Page) -> list[dict]:
    """The bodies of chat requests that the page sends from now on."""
    bodies: list[dict] = []

    def see(request) -> None:
        if request.url.endswith("/completions"):
            bodies.append(json.loads(request.post_data))

    page.on("request", see)
    return bodies


def answer_with(page: Page, *deltas: dict, usage: dict | None = None) -> None:
    """Has chat requests of the page answered with these parts."""
    choices = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks = [*choices, {"choices": [], "usage": usage}]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
