"""Measures a server of several models in a budget that does not hold all of them: the seconds of
requests whose model is loaded and of those that wait for a swap, loads and evictions, and the
memory of the engines beside the budget.

usage: python benchmarks/model_pool.py [--model MODEL] [--models 6] [--hold 3] [--requests 2000]
                                       [--clients 8] [--turn 2]
       python benchmarks/model_pool.py --wake [--model MODEL] [--repeats 5] [--json FILE]

Models are copies of one checkpoint. Requests ask for them by Zipf's law.

`--wake` measures the seconds from a request to its answer of one token. The model is cold, asleep
at level 1, asleep at level 2, and ready. The memory of its processes stands beside them. The last
row is a start of `toolkit serve MODEL` up to the same answer. Without `--model`, it is a Llama of
153 M random parameters in bf16.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from checkpoints import make_llama_160m
from server_process import ServerProcess
from toolkit_lm_model_pool.need import as_size, memory_of

OPTIONS = {"max_num_seqs": 8, "max_model_len": 256}
BODY = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", help="default: tiny, or one of 153 M parameters")
    parser.add_argument("--models", type=int, default=6)
    parser.add_argument("--hold", type=int, default=3, help="models that the budget holds")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--turn", type=float, default=2.0)
    parser.add_argument("--wake", action="store_true", help="measure waking up")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the seconds of --wake")
    args = parser.parse_args()
    if args.wake:
        with tempfile.TemporaryDirectory() as temporary:
            figures = measure_waking(Path(temporary), args.model, args.repeats)
        if args.json is not None:
            args.json.write_text(json.dumps(figures), encoding="utf-8")
        return
    names = [f"m{number}" for number in range(args.models)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        entries = [
            {"name": name, "checkpoint": args.model or "tiny", "options": OPTIONS} for name in names
        ]
        file = folder / "models.yaml"
        file.write_text(json.dumps({"models": entries}), encoding="utf-8")
        needed = first_need(folder / "alone", file)
        budget = int(needed * (args.hold + 0.5))
        measure(folder / "trace", file, names, budget, args)


def first_need(folder: Path, file: Path) -> int:
    """Bytes that a model alone needs by the estimate, which is the most."""
    folder.mkdir()
    server = ServerProcess(folder, "--models", str(file))
    try:
        cards = httpx.get(f"http://127.0.0.1:{server.port}/v1/models").json()["data"]
    finally:
        server.stop()
    return int(cards[0]["bytes_needed"])


def measure(
    folder: Path, file: Path, names: list[str], budget: int, args: argparse.Namespace
) -> None:
    folder.mkdir()
    server = ServerProcess(
        folder,
        *("--models", str(file), "--models-memory", str(budget)),
        *("--models-turn", str(args.turn), "--models-timeout", "600"),
    )
    weights = [1 / (place + 1) for place in range(len(names))]
    trace = random.Random(0).choices(names, weights, k=args.requests)
    taken: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            children = psutil.Process(server.process.pid).children()
            taken.append(memory_of(child.pid for child in children))
            time.sleep(0.5)

    try:
        url = f"http://127.0.0.1:{server.port}"
        with httpx.Client(base_url=url, timeout=700) as client:
            watcher = threading.Thread(target=watch)
            watcher.start()
            begun = time.perf_counter()
            with ThreadPoolExecutor(args.clients) as threads:
                seconds = list(threads.map(lambda name: asked(client, name), trace))
            whole = time.perf_counter() - begun
            over.set()
            watcher.join()
            cards = client.get("/v1/models").json()["data"]
    finally:
        over.set()
        server.stop()
    report(seconds, whole, cards, taken, budget)


def measure_waking(folder: Path, model: str | None, repeats: int) -> dict[str, list[float]]:
    """Prints a table of the states of one model. Returns the seconds by state."""
    checkpoint = model or str(make_llama_160m(folder / "checkpoint"))
    entry = {"name": "m", "checkpoint": checkpoint, "options": OPTIONS, "idle": "sleep"}
    file = folder / "models.yaml"
    file.write_text(json.dumps({"models": [entry]}), encoding="utf-8")
    served = folder / "pool"
    served.mkdir()
    server = ServerProcess(served, "--models", str(file), "--admin-routes")
    found: dict[str, list[float]] = {}
    memory: dict[str, int] = {"cold": 0}
    before = {
        "cold": ("/models/unload", {}),
        "asleep (level 1)": ("/models/sleep", {"level": 1}),
        "asleep (level 2)": ("/models/sleep", {"level": 2}),
        "ready": ("/models/wake_up", {}),
    }
    try:
        url = f"http://127.0.0.1:{server.port}"
        with httpx.Client(base_url=url, timeout=700) as client:
            for _ in range(repeats):
                for state, (path, more) in before.items():
                    client.post(path, json={"model": "m", **more}).raise_for_status()
                    children = psutil.Process(server.process.pid).children()
                    memory[state] = memory_of(child.pid for child in children)
                    found.setdefault(state, []).append(asked(client, "m", max_tokens=1))
    finally:
        server.stop()
    for number in range(repeats):
        found.setdefault("toolkit serve", []).append(start(folder / f"alone{number}", checkpoint))
    slowest = statistics.median(found["toolkit serve"])
    print("| state | seconds to an answer | least | most | of a start | memory before |")
    print("|---|---|---|---|---|---|")
    for state, seconds in found.items():
        middle = statistics.median(seconds)
        print(
            f"| {state} | {middle:.3f} | {min(seconds):.3f} | {max(seconds):.3f} | "
            f"{middle / slowest:.3f} | {as_size(memory.get(state, 0))} |"
        )
    return found


def start(folder: Path, checkpoint: str) -> float:
    """Seconds from the start of a server of one model to its first answer."""
    folder.mkdir()
    begun = time.perf_counter()
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    server = ServerProcess(folder, checkpoint, "--served-model-name", "m", *words)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=700) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.01)
            asked(client, "m", max_tokens=1)
        return time.perf_counter() - begun
    finally:
        server.stop()


def asked(client: httpx.Client, name: str, **more: object) -> float:
    """Seconds of a request."""
    begun = time.perf_counter()
    client.post("/v1/completions", json={"model": name, **BODY, **more}).raise_for_status()
    return time.perf_counter() - begun


def report(
    seconds: list[float], whole: float, cards: list[dict], taken: list[int], budget: int
) -> None:
    loads = sum(card["loads"] for card in cards)
    evictions = sum(card["evictions"] for card in cards)
    cuts = statistics.quantiles(seconds, n=100)
    print("| requests | seconds | p50 | p90 | p99 | longest | loads | evictions | most memory |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {len(seconds)} | {whole:.1f} | {cuts[49]:.3f} | {cuts[89]:.3f} | {cuts[98]:.3f} | "
        f"{max(seconds):.2f} | {loads} | {evictions} | {as_size(max(taken))} of "
        f"{as_size(budget)} |"
    )


if __name__ == "__main__":
    main()
