"""Decode and prefill of models with recurrent states, latent caches, sinks, experts or positions in
three directions, against transformers' `generate`, in one process, runs interleaved (A B A B),
medians. Of Qwen3-VL the language part is measured: prompts have no pictures.

usage: python benchmarks/states.py [--runs 3] [--only qwen3_next,bamba,deepseek_v2] [--profile]

Random checkpoints in bfloat16 of a hidden size of 512 and 8 layers, with the heads of the real
models. Greedy, ignoring end-of-sequence tokens, new random prompts per run:
    decode   32 x (16 in, 17 out), less the time of 32 x (16 in, 1 out)
    prefill  1 x (512 in, 1 out)

Predicted: at least 3 times the rate of transformers in both. Came, in one run each in one thread of
an Intel Xeon with AMX, whose two cores were busy with other work (rates differ by half from run to
run): Bamba's shape 13.2 (decode, 525 against 40 tokens/s) and 3.9 (prefill, 1227 against 318),
Qwen3-Next's 3.2 (87 against 28) and 2.3 (318 against 138), DeepSeek-V2-Lite's 6.6 (180 against 27)
and 2.0 (277 against 140). Of two runs each, as busy: Jamba's 4.2 (569 against 136) and 7.3 (1065
against 146), Kimi Linear's 3.1 (88 against 28) and 14.0 (608 against 43), LFM3's 1.9 (292 against
154) and 1.5 (1207 against 789), and Mamba-2's 4.8 in prefill (1211 against 250).
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import VOCAB_SIZE, save_tokenizer
from offline import BATCH, Toolkit, Transformers, Workload

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            "head_dim": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        },
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            "attn_layer_indices": [3, 7],
            "mamba_n_heads": 16,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 128,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 16, "head_dim": 64, "n_groups": 1, "state_size": 128},
    ),
    "jamba": (
        "JambaForCausalLM",
        {
            "attn_layer_period": 4,
            "attn_layer_offset": 3,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        {
            "num_key_value_heads": 8,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "linear_num_heads": 8,
            "linear_head_dim": 128,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
        },
    ),
    "lfm3": ("Lfm3ForCausalLM", {"head_dim": 64}),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
    ),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {"intermediate_size": 3072}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            "head_dim": 64,
            "sliding_window": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "intermediate_size": 512,
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            "head_dim": 64,
            "global_head_dim": 128,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**COMMON, "head_dim": 128},
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 4,
                "out_hidden_size": 512,
                "deepstack_visual_indexes": [0, 1],
            },
            "tie_word_embeddings": True,
            "image_token_id": 4,
            "video_token_id": 5,
            "vision_start_token_id": 6,
            "vision_end_token_id": 7,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
        },
    ),
}


def make(folder: Path, shape: str) -> Path:
    """Writes a checkpoint of random parameters."""
    import torch
    import transformers

    architecture, fields = SHAPES[shape]
    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    own = fields if "text_config" in fields else COMMON | fields
    model = model_class(model_class.config_class(**own))
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def toolkit(folder: Path, shape: str) -> Toolkit:
    # A processor of pictures is not needed by prompts without.
    sees = "vision_config" in SHAPES[shape][1]
    return Toolkit(folder, **({"renderer": "tokens"} if sees else {}))


def workload(count: int, prompt: int, new: int, seed: int) -> Workload:
    rng = random.Random(seed)
    return [([rng.randrange(10, VOCAB_SIZE) for _ in range(prompt)], new) for _ in range(count)]


def seconds(system: Toolkit | Transformers, work: Workload) -> float:
    start = time.perf_counter()
    system.run(work)
    return time.perf_counter() - start


def decode_rate(system: Toolkit | Transformers, seed: int) -> float:
    """Tokens per second of steps of 32 rows."""
    first = seconds(system, workload(BATCH, 16, 1, seed))
    return BATCH * 16 / (seconds(system, workload(BATCH, 16, 17, seed + 50)) - first)


def prefill_rate(system: Toolkit | Transformers, seed: int) -> float:
    """Prompt tokens per second."""
    return 512 / seconds(system, workload(1, 512, 1, seed))


def measure(folder: Path, shape: str, runs: int) -> None:
    systems = [toolkit(folder, shape), Transformers(folder)]
    # Else a collection of all that both have imported falls into a run of either.
    gc.collect()
    gc.freeze()
    for name, rate in (("decode", decode_rate), ("prefill", prefill_rate)):
        found: dict[str, list[float]] = {system.name: [] for system in systems}
        for run in range(runs + 1):
            for system in systems:
                found[system.name].append(rate(system, 100 + run))
        # The first run warms up.
        ours, theirs = (statistics.median(found[system.name][1:]) for system in systems)
        print(
            f"{shape} {name}: {ours:.0f} tokens/s, transformers {theirs:.0f}; "
            f"ratio {ours / theirs:.2f}",
            flush=True,
        )


def profile(folder: Path, shape: str) -> None:
    """Prints what steps of our own spend their time on."""
    import torch

    system = toolkit(folder, shape)
    for name, work in (
        ("decode", workload(BATCH, 16, 64, 1)),
        ("prefill", workload(4, 512, 1, 1)),
    ):
        system.run(work[:2])
        with torch.profiler.profile() as ops:
            system.run(work)
        print(name, ops.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        calls = cProfile.Profile()
        calls.runcall(system.run, work)
        pstats.Stats(calls).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--profile", action="store_true", help="profile instead of comparing")
    args = parser.parse_args()
    for shape in args.only.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = make(Path(name), shape)
            if args.profile:
                profile(folder, shape)
            else:
                measure(folder, shape, args.runs)


if __name__ == "__main__":
    main()
