"""What a GPU does: decode and prefill of a Llama of 8B parameters in bf16, by each attention backend, with and without CUDA graphs.

usage: python benchmarks/gpu.py [--seconds 480] [--only flash_attn,sdpa] [--folder FOLDER] [--quick]

One table. Its first lines are the machine's limits: how fast memory is copied (bytes read and bytes written), and how fast matrices of
8,192 x 8,192 are multiplied. Decode is told as a share of the first, by the bytes that a step must read: weights, keys and values. Prefill
is told as a share of the second, by the products that the model must compute. The start is that of a process, to its first token, with the
weights in the page cache; a first start with graphs compiles, too. Each case has a process of its own. What cannot run is told with the
reason, and when the seconds are over, so is what has not run. --quick runs it all on a CPU, on a model of two layers: it measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = ("flash_attn", "flashinfer", "triton", "flex", "xformers", "sdpa")
"""Backends for GPUs, those that may not be installed included."""
GRAPHS = {"no": "none", "yes": "full_and_piecewise"}
LAST_SECONDS = 15
"""With less left, no case begins."""


@dataclass(frozen=True)
class Plan:
    """What is run, and on what."""

    device: str
    dtype: str
    vocab_size: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    many: int
    """Rows of the larger decode batch."""
    steps: int
    """Of decode."""
    prompts: int
    length: int
    """Of each prompt of the prefill."""
    copy_bytes: int
    side: int
    """Of the matrices."""

    @property
    def product_weights(self) -> int:
        """Weights that are multiplied with each token, but for the head."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    def decode_bytes(self, rows: int, keys: float) -> float:
        """That a step must read, where each row sees so many keys."""
        head = self.vocab_size * self.hidden
        cached = rows * keys * 2 * self.layers * self.kv_heads * self.head_size
        return self.item_bytes * (self.product_weights + head + cached)

    def prefill_flops(self) -> float:
        """Of all prompts; the head computes one token of each."""
        tokens = self.prompts * self.length
        scores = 2 * 2 * self.layers * self.heads * self.head_size * self.prompts * self.length**2 / 2
        return 2 * self.product_weights * tokens + scores + 2 * self.prompts * self.vocab_size * self.hidden


FULL = Plan("cuda", "bfloat16", 128256, 32, 4096, 14336, 32, 8, 128, 64, 64, 8, 4096, 2**31, 8192)
QUICK = Plan("cpu", "float32", 512, 2, 64, 128, 4, 2, 16, 4, 4, 2, 32, 2**20, 64)


def make_checkpoint(plan: Plan, folder: Path) -> Path:
    """Random weights, a file for each layer. All layers have the same: speed does not depend on it."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    dtype, index = getattr(torch, plan.dtype), dict[str, str]()

    def random(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, device=plan.device)).to("cpu", dtype)

    q, kv = plan.heads * plan.head_size, plan.kv_heads * plan.head_size
    wide, narrow = (plan.intermediate, plan.hidden), (plan.hidden, plan.intermediate)
    shapes = {"self_attn.q_proj": (q, plan.hidden), "self_attn.k_proj": (kv, plan.hidden), "self_attn.v_proj": (kv, plan.hidden)}
    shapes |= {"self_attn.o_proj": (plan.hidden, q), "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": narrow}
    layer = {f"{name}.weight": random(*shape) for name, shape in shapes.items()}
    layer |= {f"{name}.weight": torch.ones(plan.hidden, dtype=dtype) for name in ("input_layernorm", "post_attention_layernorm")}
    ends = {"model.embed_tokens.weight": random(plan.vocab_size, plan.hidden), "lm_head.weight": random(plan.vocab_size, plan.hidden)}
    files = [{f"model.layers.{number}.{name}": value for name, value in layer.items()} for number in range(plan.layers)]
    for number, tensors in enumerate([ends | {"model.norm.weight": torch.ones(plan.hidden, dtype=dtype)}, *files]):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name)
        index |= dict.fromkeys(tensors, name)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": plan.hidden,
        "intermediate_size": plan.intermediate,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads,
        "head_dim": plan.head_size,
        "vocab_size": plan.vocab_size,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": plan.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def best(work: Callable[[], object], synchronize: Callable[[], object], tries: int = 8) -> float:
    """Seconds of the fastest."""
    times = []
    for _ in range(tries):
        synchronize()
        begun = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def measure_limits(plan: Plan) -> dict[str, Any]:
    """Bytes a second, read and written, of a copy; FLOP a second of a matrix product."""
    import torch

    synchronize = torch.cuda.synchronize if plan.device == "cuda" else lambda: None
    source = torch.ones(plan.copy_bytes, dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(plan.side, plan.side, device=plan.device).to(getattr(torch, plan.dtype)) for _ in range(2))
    return {
        "name": torch.cuda.get_device_name() if plan.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "copy": 2 * plan.copy_bytes / best(lambda: target.copy_(source), synchronize),
        "product": 2 * plan.side**3 / best(lambda: a @ b, synchronize),
    }


def options_for(plan: Plan, backend: str, graphs: str) -> dict[str, Any]:
    details: dict[str, Any] = {"cudagraph_mode": GRAPHS[graphs]}
    if plan is QUICK:
        details["backend"] = "eager"
    return {
        "device": plan.device,
        "dtype": plan.dtype,
        "renderer": "tokens",
        "attention_backend": backend,
        "max_model_len": plan.length + 2 * plan.steps,
        "max_num_seqs": plan.many,
        "max_num_batched_tokens": min(8192, plan.prompts * plan.length),
        "enable_prefix_caching": False,
        "optimization_level": 0 if graphs == "no" else 1,
        "compilation_config": json.dumps(details),
        **({"num_kv_blocks": 64} if plan is QUICK else {}),
    }


def run_case(plan: Plan, folder: Path, backend: str, graphs: str) -> dict[str, Any]:
    """Seconds: of the start, of a decode step of one row and of many, of the prefill."""
    import psutil
    from toolkit_lm import LLM, SamplingParams

    llm = LLM(str(folder), **options_for(plan, backend, graphs))

    def generate(rows: int, length: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [(row * 31 + i * 7) % (plan.vocab_size - 10) + 10 for i in range(length)]} for row in range(rows)]
        begun = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - begun

    generate(1, 4, 1)
    found: dict[str, Any] = {"start": time.time() - psutil.Process().create_time()}
    for name, rows in (("one", 1), ("many", plan.many)):
        # What a prompt takes is in both, and so falls out.
        generate(rows, 16, 4)
        long, short = (min(generate(rows, 16, tokens) for _ in range(2)) for tokens in (1 + plan.steps, 1))
        found[name] = max(1e-9, (long - short) / plan.steps)
    generate(plan.prompts, plan.length, 1)
    found["prefill"] = min(generate(plan.prompts, plan.length, 1) for _ in range(2))
    compiler = llm.llm_engine.client.core.executor.runner.compiler
    if graphs == "yes":
        captured = getattr(compiler, "graphs", None)
        found["mode"] = "none, the device has none" if captured is None else str(captured.mode)
        found["steps"] = {} if captured is None else {str(kind): count for kind, count in captured.num_replays.items()}
    return found


def ask(plan: Plan, seconds: float, *arguments: str) -> dict[str, Any]:
    """What a process of its own finds; {"skipped": the reason} where it fails, or where the seconds are over."""
    command = [sys.executable, __file__, *(["--quick"] if plan is QUICK else []), "--case", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=os.environ)
    except subprocess.TimeoutExpired:
        return {"skipped": f"it was not done in the {seconds:.0f} s that were left"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("found "):
            return json.loads(line.removeprefix("found "))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"skipped": lines[-1][:300] if lines else f"the process ended with {done.returncode}"}


def cases(plan: Plan, only: str | None) -> Iterator[tuple[str, str, str | None]]:
    """Backend, graphs, and why it is not run; None: it is. The best backend comes first."""
    from toolkit_lm.plugin import Plugins

    registry = Plugins.load().attention_backends
    names = [entry.key for entry in sorted(registry.entries(), key=lambda entry: -entry.priority) if entry.key != "cpu"]
    for name in dict.fromkeys([*names, *KNOWN]):
        for graphs in GRAPHS:
            reason = None
            if only is not None and name not in only.split(","):
                continue
            if name not in registry:
                reason = f"not installed: pip install toolkit-lm-{name.replace('_', '-')}"
            yield name, graphs, reason


def row_of(plan: Plan, limits: dict[str, Any], backend: str, graphs: str, found: dict[str, Any]) -> str:
    if "skipped" in found:
        return f"| {backend} | {graphs} | skipped: {found['skipped']} | | | |"
    cells = [f"{found['start']:.1f} s"]
    for name, rows in (("one", 1), ("many", plan.many)):
        share = plan.decode_bytes(rows, 16 + plan.steps / 2) / found[name] / limits["copy"]
        cells.append(f"{found[name] * 1e3:.2f} ms, {rows / found[name]:,.0f} tokens/s, {share:.0%}")
    share = plan.prefill_flops() / found["prefill"] / limits["product"]
    cells.append(f"{plan.prompts * plan.length / found['prefill']:,.0f} tokens/s, {share:.0%}")
    if graphs == "yes":
        steps = ", ".join(f"{count} {kind}" for kind, count in found["steps"].items())
        graphs = f"{found['mode']} (steps: {steps})" if steps else found["mode"]
    return f"| {backend} | {graphs} | " + " | ".join(cells) + " |"


def race(plan: Plan, folder: Path, seconds: float, only: str | None) -> None:
    end = time.monotonic() + seconds
    limits = ask(plan, seconds, "limits")
    if "skipped" in limits:
        raise SystemExit(f"the machine's limits could not be measured: {limits['skipped']}. --quick runs on a CPU.")
    made = ask(plan, end - time.monotonic(), "checkpoint", str(folder))
    if "skipped" in made:
        raise SystemExit(f"the checkpoint could not be made: {made['skipped']}")
    copies, products = limits["copy"] / 1e9, limits["product"] / 1e12
    print(f"{limits['name']}, torch {limits['torch']}: copies {copies:,.1f} GB/s, products {products:,.2f} TFLOP/s")
    print(f"Llama of {(plan.product_weights + 2 * plan.vocab_size * plan.hidden) / 1e9:,.2f} B parameters, {plan.dtype}\n")
    print(f"| backend | graphs | start | decode, 1 row | decode, {plan.many} rows | prefill, {plan.prompts} x {plan.length:,} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for backend, graphs, reason in cases(plan, only):
        left = end - time.monotonic()
        if reason is None and left < LAST_SECONDS:
            reason = "no time was left"
        found = ask(plan, left, "run", str(folder), backend, graphs) if reason is None else {"skipped": reason}
        print(row_of(plan, limits, backend, graphs, found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--only", help="backends, separated by commas")
    parser.add_argument("--folder", type=Path, help="a checkpoint that an earlier call has made; default: made now, and deleted")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    if args.case is not None:
        kind, *rest = args.case
        if kind == "limits":
            found = measure_limits(plan)
        elif kind == "checkpoint":
            found = {"folder": str(make_checkpoint(plan, Path(rest[0])))}
        else:
            found = run_case(plan, Path(rest[0]), rest[1], rest[2])
        print("found", json.dumps(found), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        race(plan, args.folder or Path(folder) / "model", args.seconds, args.only)


if __name__ == "__main__":
    main()
