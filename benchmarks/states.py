"""Decode and prefill of models with recurrent states, latent caches, sinks, experts or positions in
three directions, against transformers' `generate`, in one process, and llama.cpp, where it has the
family. Runs are interleaved (A B C A B C); shown are medians. Of Qwen3-VL the language part is
measured: prompts have no pictures.

usage: python benchmarks/states.py [--runs 3] [--only qwen3_next,bamba,deepseek_v2] [--profile]
       [--works decode,prefill] [--peer llama.cpp=SOURCES]

Random checkpoints in bfloat16 of a hidden size of 512 and 8 layers, with the heads of the real
models. Greedy, ignoring end-of-sequence tokens, new random prompts per run:
    decode     32 x (16 in, 17 out), less the time of 32 x (16 in, 1 out)
    decode-64  32 x (128 in, 65 out), less the time of 32 x (128 in, 1 out); without transformers,
               which would take minutes
    prefill    1 x (512 in, 1 out)

SOURCES is a folder of llama.cpp, as states_llama_cpp.py tells. Its runs are llama-batched-bench's,
of bf16 files, with the number of threads that torch has here; it draws the tokens of each step, and
samples none. Of its settings (flash attention, one cache or many) a first run of each keeps the
fastest. A shape that llama.cpp does not convert or not run is said to be so, with its reason.

Predicted: at least 3 times the rate of transformers in both. Came, in one run each in one thread of
an Intel Xeon with AMX, whose two cores were busy with other work (rates differ by half from run to
run): Bamba's shape 13.2 (decode, 525 against 40 tokens/s) and 3.9 (prefill, 1227 against 318),
Qwen3-Next's 3.2 (87 against 28) and 2.3 (318 against 138), DeepSeek-V2-Lite's 6.6 (180 against 27)
and 2.0 (277 against 140). Of two runs each, as busy: Jamba's 4.2 (569 against 136) and 7.3 (1065
against 146), Kimi Linear's 3.1 (88 against 28) and 14.0 (608 against 43), LFM3's 1.9 (292 against
154) and 1.5 (1207 against 789), and Mamba-2's 4.8 in prefill (1211 against 250).

Decode beside llama.cpp (of llama-cpp-python 0.3.36), predicted at least 1.1 times its rate, in one
thread of an AMD Zen 5 without AMX, as busy, two runs, tokens per second of ours, transformers and
llama.cpp: Qwen3-VL 1793, 546, 663 (2.7 times llama.cpp's); Gemma 4 1745, 916, 767 (2.3); gpt-oss
1083, 375, 475 (2.3); Qwen3-Next 1067, 214, 352 (3.0); DeepSeek-V2-Lite in 27 layers 218, 41, 108
(2.0). On both cores with nothing beside it, three runs: Qwen3-VL 5391, 1584, 2304 (2.3), Gemma 4
5994, 2066, 2109 (2.8), gpt-oss 2941, 1048, 1561 (1.9), Qwen3-Next 1516, 507, 1015 (1.5),
DeepSeek-V2-Lite in 27 layers 693, 231, 516 (1.3).
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import VOCAB_SIZE, save_tokenizer
from offline import BATCH, Toolkit, Transformers, Workload
from states_llama_cpp import BENCH, LlamaCpp, LlamaCppError

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
DEEPSEEK_LITE: dict[str, Any] = {
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
            "tie_word_embeddings": False,
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
            "text_config": {
                **COMMON,
                "head_dim": 128,
                # The default, which llama.cpp must be told.
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 500000.0,
                    "mrope_section": [24, 20, 20],
                    "mrope_interleaved": True,
                },
            },
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
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK_LITE),
    # llama.cpp tells a DeepSeek-V2-Lite by the number of its layers.
    "deepseek_v2_27": ("DeepseekV2ForCausalLM", DEEPSEEK_LITE | {"num_hidden_layers": 27}),
}

System = Toolkit | Transformers | LlamaCpp


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


class Work(NamedTuple):
    """`count` requests of `prompt` tokens, and `new` steps after them. Prefill has none: its first
    token is the prompts'."""

    count: int
    prompt: int
    new: int

    def rate(self, system: System, seed: int) -> float:
        """Tokens per second: of all steps' rows, or of prompts without steps."""
        if isinstance(system, LlamaCpp):
            return system.rate(*self)
        first = seconds(system, workload(self.count, self.prompt, 1, seed))
        if not self.new:
            return self.count * self.prompt / first
        whole = workload(self.count, self.prompt, 1 + self.new, seed + 50)
        return self.count * self.new / (seconds(system, whole) - first)


WORKS = {
    "decode": Work(BATCH, 16, 16),
    "decode-64": Work(BATCH, 128, 64),
    "prefill": Work(1, 512, 0),
}
WITHOUT_TRANSFORMERS = "decode-64"


def measure(
    folder: Path, shape: str, works: Sequence[str], runs: int, llama_cpp: Path | None
) -> None:
    import torch

    systems: list[System] = [toolkit(folder, shape), Transformers(folder)]
    if llama_cpp is not None:
        try:
            systems.append(LlamaCpp(llama_cpp, folder, torch.get_num_threads()))
        except LlamaCppError as error:
            print(f"{shape}: without llama.cpp: {error}", flush=True)
    # Else a collection of all that both have imported falls into a run of either.
    gc.collect()
    gc.freeze()
    for name in works:
        without = Transformers if name == WITHOUT_TRANSFORMERS else ()
        found = race(WORKS[name], [each for each in systems if not isinstance(each, without)], runs)
        ours = found.pop(Toolkit.name)
        told = [f"{peer} {rate:.0f}, ratio {ours / rate:.2f}" for peer, rate in found.items()]
        print(f"{shape} {name}: {'; '.join([f'{ours:.0f} tokens/s', *told])}", flush=True)


def race(work: Work, systems: list[System], runs: int) -> dict[str, float]:
    """Median rates by system, in the order of `systems`; a system that fails has none."""
    found: dict[str, list[float]] = {system.name: [] for system in systems}
    # The first run warms up.
    for run in range(runs + 1):
        for system in [system for system in systems if system.name in found]:
            try:
                found[system.name].append(work.rate(system, 100 + run))
            except LlamaCppError as error:
                del found[system.name]
                print(f"{system.name} is out: {error}", flush=True)
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


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


def sources_of(text: str) -> Path:
    """The folder of llama.cpp that `--peer` names."""
    name, _, folder = text.partition("=")
    if name != LlamaCpp.name:
        raise argparse.ArgumentTypeError(f"expected {LlamaCpp.name}=SOURCES, not {text!r}")
    sources = Path(folder).absolute()
    if not (sources / BENCH).exists():
        raise argparse.ArgumentTypeError(f"{sources / BENCH} is not there: build it")
    return sources


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(SHAPES))
    parser.add_argument("--works", default="decode,prefill", help=", ".join(WORKS))
    parser.add_argument("--peer", type=sources_of, metavar="llama.cpp=SOURCES")
    parser.add_argument("--profile", action="store_true", help="profile instead of comparing")
    args = parser.parse_args()
    for shape in args.only.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = make(Path(name), shape)
            if args.profile:
                profile(folder, shape)
            else:
                measure(folder, shape, args.works.split(","), args.runs, args.peer)


if __name__ == "__main__":
    main()
