"""Writes the pictures of the page at `/` in docs/images, from a server with the model tiny.

usage: python tests/page_pictures.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from browsing import CHROMIUM, FLAGS, answer_with, ask
from playwright.sync_api import Page, expect, sync_playwright

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


def main() -> None:
    """Serves the model, and takes one picture of each size."""
    program = "from toolkit_lm_cli import main; main()"
    command = [sys.executable, "-c", program, "serve", "tiny", "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        found = (re.search(r"Serving \S+ at (\S+)", line) for line in server.stdout)
        address = next(at[1] for at in found if at)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            for name, (width, height, scheme) in SIZES.items():
                size = {"width": width, "height": height}
                page = browser.new_page(viewport=size, color_scheme=scheme)
                page.goto(address)
                fill(page)
                if name == "ui-dark":
                    page.click("#settings-toggle")
                page.screenshot(path=FOLDER / f"{name}.png")
                page.close()
            browser.close()
    finally:
        server.terminate()
        server.wait(30)


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
