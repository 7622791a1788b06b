"""The model `tiny`, or a hybrid one, on a card against the CPU in float32: greedy tokens, seeded
draws, and how likely tokens are.

usage: python -m gpu_kit.smoke [--device cuda] [--cases plain|graphs|inductor|hybrid]

The hybrid one is a Qwen3-Next of random weights, with heads of the real one's size. Prompts of
more than 256 tokens come in five chunks and more. In float32 the tokens are equal, but where the
two best are as good as equally likely. In bfloat16 they need not be; the CPU's tokens must be as
likely as the CPU says.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_kit.report import MissedError, RefusedError, checking, die_with_the_kit, emit

LONG = "the cat and the dog went out to the garden and " * 30
PROMPTS = [
    "The cat sat on",
    "Once upon a time",
    "January, February,",
    "2 + 3 =",
    LONG[:900],
    LONG[100:1300],
    LONG[7:1100],
    "A",
]
CHUNK = 64
CHUNKS = 5
"""Tokens of a step, and how many steps the long prompts take at least."""
TOKENS = 16
DRAWN_TOKENS = 12
SEEDS = 8
NEAR = 1e-3
"""Nearer log probabilities of the two best tokens may be told apart otherwise, in float32."""
OFF = {"float32": 1e-3, "bfloat16": 0.15}
"""The log probabilities of the same tokens may be so far from the CPU's in float32. In bfloat16 the
CPU's own are 0.07 off."""
BASE = {
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "attention_backend": "sdpa",
    "kernels": "torch",
}
EVERYTHING = {"attention_backend": "auto", "kernels": "auto", "max_num_batched_tokens": 8192}
BF16 = {"dtype": "bfloat16"}
FP32 = {"dtype": "float32"}
TRITON = {"attention_backend": "triton", "kernels": "triton"}


def graphs(mode: str, backend: str = "eager") -> dict[str, Any]:
    """Options: CUDA graphs of a mode, between parts that `backend` computes."""
    details = {
        "backend": backend,
        "cudagraph_mode": mode,
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    }
    return {"optimization_level": 1, "compilation_config": json.dumps(details)}


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "plain": {
        "fp32 sdpa": FP32,
        "fp32 triton": {**FP32, "attention_backend": "triton"},
        "bf16 flash_attn": {**BF16, "attention_backend": "flash_attn"},
        "bf16 sdpa": BF16,
        "bf16 triton": {**BF16, "attention_backend": "triton"},
        "bf16 triton, its kernels": {**BF16, "attention_backend": "triton", "kernels": "triton"},
        "bf16 auto, one step of all": {**BF16, **EVERYTHING},
    },
    "graphs": {
        "fp32 sdpa, piecewise": {**FP32, **graphs("piecewise")},
        "fp32 triton, whole decode steps": {
            **FP32,
            "attention_backend": "triton",
            **graphs("full_and_piecewise"),
        },
        "bf16 flash_attn, piecewise": {
            **BF16,
            "attention_backend": "flash_attn",
            **graphs("piecewise"),
        },
        "bf16 triton, its kernels, whole decode steps": {
            **BF16,
            "attention_backend": "triton",
            "kernels": "triton",
            **graphs("full_and_piecewise"),
        },
    },
    "inductor": {"fp32 sdpa, piecewise, inductor": {**FP32, **graphs("piecewise", "inductor")}},
    "hybrid": {
        "fp32 sdpa": FP32,
        "fp32 triton, its kernels": {**FP32, **TRITON},
        "fp32 triton, its kernels, one step of all": {
            **FP32,
            **TRITON,
            "max_num_batched_tokens": 8192,
        },
        "bf16 triton, its kernels": {**BF16, **TRITON},
    },
}
HYBRID = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    # All of them: a choice that rounding turns is an error of another kind.
    "num_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""Fields of a Qwen3-Next: three layers of four have states."""


@dataclass(frozen=True)
class Told:
    """Answer of an engine to the prompts."""

    tokens: list[list[int]]
    gaps: list[list[float]]
    """Between the log probabilities of the two best tokens, at each of them."""
    drawn: list[list[int]]
    likely: list[list[float]]
    """Log probabilities of the reference's tokens after the prompts."""
    num_chunks: int
    replayed: dict[str, int] | None
    """Steps by graphs, by their kind; None: there are no graphs."""


def write_hybrid(folder: str) -> None:
    import torch
    import transformers
    from toolkit_lm_devkit import write_tokenizer

    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(**HYBRID)
    transformers.Qwen3NextForCausalLM(config).save_pretrained(folder)
    write_tokenizer(Path(folder), config.vocab_size)


def ask(
    device: str, reference: list[list[int]] | None = None, *, model: str = "tiny", **options: Any
) -> Told:
    """`reference`: tokens whose log probabilities are asked for; None: the engine's own greedy
    ones. Raises RefusedError."""
    from toolkit_lm import LLM, SamplingParams
    from toolkit_lm.errors import UnsupportedError

    blocks = {"num_kv_blocks": 600} if device == "cpu" else {}
    try:
        llm = LLM(model, device=device, **{**BASE, **blocks, **options})
    except UnsupportedError as error:
        raise RefusedError(str(error)) from None
    with llm:
        greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2)
        drawn = [
            SamplingParams(
                temperature=0.9,
                top_p=0.9,
                top_k=50,
                seed=seed,
                max_tokens=DRAWN_TOKENS,
                ignore_eos=True,
            )
            for seed in range(SEEDS)
        ]
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
        draws = [
            list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, drawn, use_tqdm=False)
        ]
        tokens = [list(one.outputs[0].token_ids) for one in outputs]
        texts = [
            [*one.prompt_token_ids, *after]
            for one, after in zip(outputs, reference or tokens, strict=True)
        ]
        told = Told(
            tokens,
            [[_gap(step) for step in one.outputs[0].logprobs] for one in outputs],
            draws,
            _likely(llm, texts),
            math.ceil(
                max(len(one.prompt_token_ids) for one in outputs)
                / llm.config.scheduler.max_num_batched_tokens
            ),
            _replayed(llm),
        )
    del llm
    gc.collect()
    return told


def _gap(step: Mapping[int, Any]) -> float:
    best, second, *_ = sorted((one.logprob for one in step.values()), reverse=True)
    return best - second


def _likely(llm: Any, texts: list[list[int]]) -> list[list[float]]:
    """Log probabilities of the last tokens of each text."""
    from toolkit_lm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": one} for one in texts], params, use_tqdm=False)
    return [
        [
            step[token].logprob
            for token, step in zip(text[-TOKENS:], one.prompt_logprobs[-TOKENS:], strict=True)
        ]
        for text, one in zip(texts, outputs, strict=True)
    ]


def _replayed(llm: Any) -> dict[str, int] | None:
    captured = getattr(llm.engine.client.core.executor.runner.compiler, "graphs", None)
    if captured is None:
        return None
    return {
        str(kind): count
        for kind, count in captured.num_replays.items()
        if count and str(kind) != "none"
    }


def agreeing(one: list[int], other: list[int]) -> int:
    """How many of the first are the same."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one)
    )


def compare(ours: Told, reference: Told, dtype: str, found: dict[str, Any]) -> None:
    """Puts into `found` what is to be said of a case. Raises MissedError where it is wrong."""
    agree = [agreeing(a, b) for a, b in zip(reference.tokens, ours.tokens, strict=True)]
    drawn = [agreeing(a, b) for a, b in zip(reference.drawn, ours.drawn, strict=True)]
    pairs = [
        pair
        for rows in zip(reference.likely, ours.likely, strict=True)
        for pair in zip(*rows, strict=True)
    ]
    # Not by `max`, which passes over NaN.
    off = sorted((abs(a - b) for a, b in pairs), key=lambda one: (math.isnan(one), one))[-1]
    found.update(agreeing=agree, drawn=drawn, off=round(off, 5))
    if not off <= OFF[dtype]:
        raise MissedError(f"log probabilities are {off:.4f} off, and may be {OFF[dtype]}")
    if dtype == "float32":
        far = [
            row
            for row, count in enumerate(agree)
            if count < TOKENS and reference.gaps[row][count] >= NEAR
        ]
        if far:
            raise MissedError(f"other greedy tokens than the CPU's, of prompts {far}")
        if min(drawn) < DRAWN_TOKENS:
            raise MissedError("other seeded draws than the CPU's")


def check_replayed(replayed: Mapping[str, int], mode: str) -> None:
    """Raises MissedError where graphs of a kind that the mode asks for have run no step."""
    for kind in mode.split("_and_"):
        if not replayed.get(kind):
            raise MissedError(
                f"no step ran by a graph that is {kind}, which the mode {mode} asks for"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", choices=list(CASES), default="plain")
    args = parser.parse_args()
    die_with_the_kit()
    with tempfile.TemporaryDirectory() as folder:
        model = "tiny"
        if args.cases == "hybrid":
            write_hybrid(model := folder)
        check(args.cases, args.device, model)


def check(cases: str, device: str, model: str) -> None:
    reference: Told | None = None
    with checking("reference: the CPU in float32") as found:
        reference = ask("cpu", model=model, **FP32)
        found["chunks"] = reference.num_chunks
        if reference.num_chunks < CHUNKS:
            raise MissedError(
                f"the longest prompt takes {reference.num_chunks} chunks, and is to take {CHUNKS}"
            )
    if reference is None:
        emit("all cases", "failed", why="there is nothing to compare with")
        return
    has_graphs = cases in ("graphs", "inductor")
    for name, options in CASES[cases].items():
        with checking(name) as found:
            ours = ask(device, reference.tokens, model=model, **options)
            if has_graphs:
                found["replayed"] = ours.replayed
            compare(ours, reference, options["dtype"], found)
            if has_graphs and device == "cuda":
                check_replayed(
                    ours.replayed or {}, json.loads(options["compilation_config"])["cudagraph_mode"]
                )


if __name__ == "__main__":
    main()
