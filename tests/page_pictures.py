"""Writes the pictures of the page at `/` in docs/images, from a server with the model tiny and one
of four models.

usage: python tests/page_pictures.py [models]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browsing import CHROMIUM, FLAGS, answer_with, ask
from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(__file__).parents[1] / "docs/images"
SIZES = {
    "ui": (1280, 820, "light"),
    "ui-dark": (1280, 820, "dark"),
    "ui-phone": (390, 780, "light"),
}
ANSWER = """Two capitals, and how far they are apart:

| city | people | since |
|:--|--:|--:|
| Paris | 2.1 million | 987 |
| Rome | 2.8 million | 1871 |

```python
from math import dist

print(dist(paris, rome))  # about 1,100 km
```

The mean is $\\bar{x} = \\frac{1}{n} \\sum_{i=1}^n x_i$.
"""


MODELS = [
    {"name": "assistant", "checkpoint": "tiny", "pin": True},
    {"name": "dates", "checkpoint": "tiny-dates"},
    {"name": "tools", "checkpoint": "tiny-tools"},
    {"name": "vectors", "checkpoint": "tiny", "options": {"convert": "embed"}},
]


def main() -> None:
    """Takes the pictures of one model, or with the argument `models` that of four."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        if sys.argv[1:] != ["models"]:
            one_model(browser)
        several_models(browser)
        browser.close()


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """The address of a server."""
    program = "from toolkit_lm_cli import main; main()"
    command = [sys.executable, "-c", program, "serve", *arguments, "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = (re.search(r"Serving .+ at (\S+)", line) for line in server.stdout)
        yield next(at[1] for at in found if at)
    finally:
        server.terminate()
        server.wait(30)


def one_model(browser: Browser) -> None:
    """One picture of each size."""
    with serving("tiny") as address:
        for name, (width, height, scheme) in SIZES.items():
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(address)
            fill(page)
            if name == "ui-dark":
                page.click("#settings-toggle")
            page.screenshot(path=FOLDER / f"{name}.png")
            page.close()


def several_models(browser: Browser) -> None:
    """Four models: a pinned one that answers, one that is loaded, one that is being loaded, and a
    cold one."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "models.yaml"
        options = {"num_kv_blocks": 512}
        entries = [
            {**entry, "options": {**options, **entry.get("options", {})}} for entry in MODELS
        ]
        file.write_text(json.dumps({"models": entries}), encoding="utf-8")
        flags = ["--models", str(file), "--models-memory", "2GiB", "--admin-routes"]
        with serving(*flags) as address:
            page = browser.new_page(viewport={"width": 1280, "height": 620}, color_scheme="light")
            page.goto(address)
            ask(page, "What is the capital of France?")
            page.get_by_role("button", name="Load vectors", exact=True).click()
            vectors = page.locator("#models tr", has_text="vectors")
            expect(vectors.locator(".state")).to_have_text("ready")
            page.get_by_role("button", name="Load dates", exact=True).click()
            dates = page.locator("#models tr", has_text="dates")
            expect(dates.locator(".state")).to_have_text("loading")
            page.screenshot(path=FOLDER / "ui-models.png")
            page.close()


def fill(page: Page) -> None:
    """A conversation: a few answers of the model, and one with all that Markdown has."""
    expect(page.locator("#status-dot")).to_have_class("dot ready")
    for question in ("What is the capital of France?", "And of Italy?"):
        ask(page, question)
    answer_with(page, {"content": ANSWER}, usage={"prompt_tokens": 96, "completion_tokens": 118})
    ask(page, "Compare the two in a table, and show code for the distance.")
    page.wait_for_timeout(2500)


if __name__ == "__main__":
    main()
