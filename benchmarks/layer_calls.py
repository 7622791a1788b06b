"""Measures the gain of computing decoder layers in one call of the kernels, per decode step and
family.

usage: python benchmarks/layer_calls.py [--families llama,granite,gemma3,gemma4,olmo2,mixtral]
[--rows 1,32] [--steps 30] [--turns 4]

Each family has 12 layers of the 160M shape and random weights in bf16; mixtral has 8 small experts,
two a token. One engine in this process decodes, its layers in turn module by module and in one
call. A line has the medians of steps in milliseconds, the ratio, and the least and greatest ratio
of one turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from statistics import median
from typing import Any

from toolkit_lm import LLM, SamplingParams
from toolkit_lm.engine import InProcessClient
from toolkit_lm.model import FusibleLayer

WARMUP = 10
PROMPT = 32
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "dtype": "bfloat16",
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "granite": (
        "Granite",
        {
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
        },
    ),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 64, "sliding_window": 512}),
    "gemma4": (
        "Gemma4",
        {
            "global_head_dim": 128,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": 32000,
            "sliding_window": 512,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 1024}),
}


def make(family: str, folder: str) -> None:
    import torch
    import transformers

    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    model_class(model_class.config_class(**SHAPE | fields)).to(torch.bfloat16).save_pretrained(
        folder
    )


def measure(folder: str, rows: int, steps: int, turns: int) -> tuple[list[float], list[float]]:
    """The median of each turn's steps, in milliseconds: module by module, and in one call."""
    params = SamplingParams(
        max_tokens=2 * turns * (WARMUP + steps) + WARMUP,
        temperature=0,
        ignore_eos=True,
        detokenize=False,
    )
    assert PROMPT + params.max_tokens <= SHAPE["max_position_embeddings"], "fewer steps or turns"
    with LLM(
        folder,
        dtype="bfloat16",
        renderer="tokens",
        engine_process=False,
        num_kv_blocks=4096,
        max_num_seqs=rows,
    ) as llm:
        client = llm.engine.client
        assert isinstance(client, InProcessClient)
        core: Any = client.core
        layers = [
            module
            for module in core.executor.runner.model.modules()
            if isinstance(module, FusibleLayer)
        ]
        fused = [layer.fused for layer in layers]
        assert all(fused), "the kernels do not compute every layer in one call"
        for row in range(rows):
            llm.engine.add_request(str(row), {"prompt_token_ids": [7 + row] * PROMPT}, params)
        found: tuple[list[float], list[float]] = [], []
        for turn in range(2 * turns):
            for layer, call in zip(layers, fused, strict=True):
                layer.fused = call if turn % 2 else None
            times = []
            for _ in range(WARMUP + steps):
                start = time.perf_counter()
                llm.engine.step()
                times.append(1000 * (time.perf_counter() - start))
            found[turn % 2].append(median(times[WARMUP:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--rows", default="1,32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    print(f"{'family':>8} {'rows':>4} {'modules':>8} {'one call':>8} {'ratio':>6}  ms")
    for family in args.families.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make(family, folder)
            for rows in map(int, args.rows.split(",")):
                apart, together = measure(folder, rows, args.steps, args.turns)
                ratios = [one / other for one, other in zip(apart, together, strict=True)]
                shown = (
                    f"{median(apart):8.2f} {median(together):8.2f} {median(ratios):6.3f}  "
                    f"({min(ratios):.3f} to {max(ratios):.3f})"
                )
                print(f"{family:>8} {rows:>4} {shown}", flush=True)


if __name__ == "__main__":
    main()
