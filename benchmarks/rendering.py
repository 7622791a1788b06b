"""Measures the cost of rendering a chat on top of the tokenizer's own work on the same text.

usage: python benchmarks/rendering.py [--tokens 4096] [--runs 31] [--check]

Chats of several turns go through the chat template of the embedded model `tiny`, and are tokenized.
The peer is `tokenizers` alone, on the text that the template gives. The two take turns; medians are
shown. `--check`: exit code 1 where rendering takes over 1.15 times as long, or where torch or
transformers was imported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import toolkit_lm_tiny
from tokenizers import Tokenizer
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import Renderer
from toolkit_lm.resolution import resolve_configured

MOST = 1.15
"""The ratio that --check admits."""
TURN = "The cat sat on the mat, and the dog asked why the old house by the river was empty. "
NUM_TURNS = 9


def make_renderer() -> Renderer:
    config = VllmConfig.make(model="tiny")
    plugins = Plugins.load(config.plugins)
    config = resolve_configured(plugins.configure(config), plugins)
    renderer: Renderer = plugins.renderers.make(config.renderer.renderer, config)
    return renderer


def chat_of(renderer: Renderer, num_tokens: int) -> list[dict[str, str]]:
    """The shortest of these chats that has so many tokens."""
    sentences = 0
    while True:
        sentences += 1
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": TURN * sentences}
            for i in range(NUM_TURNS)
        ]
        if len(renderer.render_conversation(messages).token_ids) >= num_tokens:
            return messages


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    renderer = make_renderer()
    tokenizer = Tokenizer.from_file(
        str(Path(toolkit_lm_tiny.__file__).parent / "checkpoint" / "tokenizer.json")
    )
    messages = chat_of(renderer, args.tokens)
    token_ids = renderer.render_conversation(messages).token_ids
    text = renderer.decode(token_ids)
    assert tokenizer.encode(text, add_special_tokens=False).ids == token_ids, (
        "both do the same work"
    )
    ours = []
    raw = []
    for _ in range(args.runs):
        ours.append(seconds(lambda: renderer.render_conversation(messages)))
        raw.append(seconds(lambda: tokenizer.encode(text, add_special_tokens=False)))
    rendered = statistics.median(ours)
    tokenized = statistics.median(raw)
    ratio = rendered / tokenized
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    print(
        f"{len(token_ids)} tokens: rendered in {rendered * 1e3:.2f} ms, by tokenizers alone in "
        f"{tokenized * 1e3:.2f} ms"
    )
    print(f"ratio {ratio:.2f}; imported: {', '.join(heavy) or 'neither torch nor transformers'}")
    return int(args.check and (ratio > MOST or bool(heavy)))


if __name__ == "__main__":
    sys.exit(main())
