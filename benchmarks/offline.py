"""Offline throughput against transformers' `generate`, in one process, runs interleaved (A B A B),
medians.

usage: python benchmarks/offline.py [--runs 3] [--only mixed,W1,W2] [--model FOLDER]

Workloads (greedy, ignoring end-of-sequence tokens, new random prompts per run):
    mixed   64 requests, prompts of 16-512 and outputs of 16-256 tokens, uniform, fixed
            seed; batch 32
    W1      32 x (128 in, 64 out)
    W2      1 x (128 in, 128 out)
transformers runs static batches of 32, padded left; only the tokens that were asked for are
counted.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import VOCAB_SIZE, make_llama_160m

Workload = list[tuple[list[int], int]]
BATCH = 32


def workload(name: str, seed: int) -> Workload:
    rng = random.Random(seed)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(10, VOCAB_SIZE) for _ in range(n)]

    if name == "mixed":
        sizes = random.Random(0)
        return [(tokens(sizes.randint(16, 512)), sizes.randint(16, 256)) for _ in range(64)]
    return {"W1": [(tokens(128), 64) for _ in range(32)], "W2": [(tokens(128), 128)]}[name]


class Toolkit:
    name = "toolkit-lm"

    def __init__(self, model: Path, **options: Any):
        from toolkit_lm import LLM

        self.llm = LLM(str(model), max_model_len=1024, max_num_seqs=BATCH, **options)

    def run(self, work: Workload) -> None:
        from toolkit_lm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p, _ in work], params, use_tqdm=False
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == [n for _, n in work]


class Transformers:
    name = "transformers"

    def __init__(self, model: Path):
        import torch
        import transformers

        (name,) = transformers.AutoConfig.from_pretrained(model).architectures
        model_class = getattr(transformers, name)
        self.model = model_class.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.model.generation_config.eos_token_id = None

    def run(self, work: Workload) -> None:
        for start in range(0, len(work), BATCH):
            self._batch(work[start : start + BATCH])

    def _batch(self, work: Workload) -> None:
        import torch

        longest = max(len(p) for p, _ in work)
        new = max(n for _, n in work)
        ids = torch.tensor([[3] * (longest - len(p)) + p for p, _ in work])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in work])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=3
            )
        assert out.shape[1] == longest + new


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="mixed,W1,W2")
    parser.add_argument(
        "--model", type=Path, help="a checkpoint of the 160M shape; default: made now"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama_160m(args.model or Path(folder))
        systems = [Toolkit(model), Transformers(model)]
        for system in systems:
            system.run(workload("W1", 1)[:4])
        for name in args.only.split(","):
            times: dict[str, list[float]] = {system.name: [] for system in systems}
            for run in range(args.runs):
                work = workload(name, 100 + run)
                for system in systems:
                    start = time.perf_counter()
                    system.run(work)
                    times[system.name].append(time.perf_counter() - start)
            tokens = sum(n for _, n in workload(name, 0))
            rates = {key: tokens / statistics.median(values) for key, values in times.items()}
            print(
                f"{name}: "
                + ", ".join(f"{key} {rate:.0f} output tokens/s" for key, rate in rates.items()),
                end="; ",
            )
            print(f"ratio {rates['toolkit-lm'] / rates['transformers']:.2f}", flush=True)


if __name__ == "__main__":
    main()
