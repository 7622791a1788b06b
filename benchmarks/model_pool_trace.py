"""Measures a server of eight models of several kinds, two of which are adapters of another, in a
budget that holds three engines: the seconds of requests, loads beside those of Belady's rule, and
the memory of all engines.

usage: python benchmarks/model_pool_trace.py [--requests 2000] [--clients 16] [--hold 3] [--turn 2]
                                             [--seed 0] [--json FILE]

Requests ask for the models by Zipf's law. `--json` has the figures, and the goals with whether each
is met. Each answer is compared with that of a server with room for all. Belady's rule knows what is
asked later: it evicts what is asked for last. It serves the requests one after another; a server
may answer those of a loaded model first. An engine's size is what it is measured to take alone: the
server's estimates before the first load are greater.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from toolkit_lm_model_pool.need import as_size

ROOT = Path(__file__).parents[1]
for tests in ("plugins/model_pool/tests", "contrib_models/vision/tests"):
    sys.path.insert(0, str(ROOT / tests))

from pool_server import (  # noqa: E402
    ADAPTERS,
    REQUESTS,
    SMALL,
    Served,
    belady,
    plain,
    request_of,
    save_adapters,
    served,
    write_checkpoints,
    write_models,
)
from vision_checkpoints import make_subject  # noqa: E402

RATE = 20
"""Samples of the memory in a second."""
PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAFElEQVR4nGM8IafBgA0w"
    "YRUdtBIA2HwBHmyUUMcAAAAASUVORK5CYII="
)
OPTIONS = {**SMALL, "max_num_seqs": 8}


ORDER = ("chat", "embed", "vision", "rank", "sql", "whisper", "bart", "prose")
"""Models in the order of how often they are asked for."""


def checkpoints(folder: Path) -> dict[str, str]:
    """Checkpoints of the six models that have engines."""
    found = write_checkpoints(folder)
    for name in ADAPTERS:
        REQUESTS[name] = ("/v1/completions", dict(REQUESTS["bart"][1]))
    subject = make_subject(folder / "vision", "llava")
    found["vision"] = str(subject.folder)
    parts = [
        {"type": "image_url", "image_url": {"url": PICTURE}},
        {"type": "text", "text": "What is it?"},
    ]
    body = {**REQUESTS["chat"][1], "messages": [{"role": "user", "content": parts}]}
    REQUESTS["vision"] = ("/v1/chat/completions", body)
    return found


def engine_of(name: str) -> str:
    """The model whose engine answers: adapters are in that of their parent."""
    return "chat" if name in ADAPTERS else name


def substance(answer: httpx.Response) -> Any:
    """The content of an answer, without its usage: cached tokens differ from time to time."""
    found = plain(answer.raise_for_status().json())
    return {key: value for key, value in found.items() if key != "usage"}


def sizes_of(server: Served) -> dict[str, int]:
    """Bytes that each engine needs."""
    cards = server.cards().items()
    return {name: card["bytes_needed"] for name, card in cards if name == engine_of(name)}


def alone(server: Served) -> dict[str, int]:
    """Bytes that each engine needs, where no other shares libraries with it."""
    found = {}
    for name in sizes_of(server):
        server.client.post("/unload").raise_for_status()
        server.ask(name).raise_for_status()
        found[name] = sizes_of(server)[name]
    return found


def sample(server: Served, end: Any, found: Any) -> None:
    """Samples the memory of a server's engines until the end, and then puts the samples into a
    queue. In a process of its own: threads of clients would hold it up."""
    taken: list[int] = []
    due = time.monotonic()
    try:
        while not end.wait(max(due - time.monotonic(), 0.0)):
            due += 1 / RATE
            taken.append(server.memory())
    finally:
        found.put(taken)


class Watch:
    """Samples the memory of a server's engines in a process, and the seconds of their loads in a
    thread."""

    def __init__(self, server: Served) -> None:
        self._server = server
        context = multiprocessing.get_context("fork")
        self._end = context.Event()
        self._found = context.SimpleQueue()
        self._process = context.Process(target=sample, args=(server, self._end, self._found))
        self._thread = threading.Thread(target=self._run)
        self.taken: list[int] = []
        self.slowest_load = 0.0

    def _run(self) -> None:
        while not self._end.wait(1.0):
            self.look()

    def look(self) -> None:
        self.slowest_load = max(self.slowest_load, self._server.slowest_load())

    def __enter__(self) -> Watch:
        self._process.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.taken = self._found.get()
        self._process.join()


def measure(
    server: Served, trace: Sequence[str], expected: Mapping[str, Any], clients: int
) -> dict[str, Any]:
    """Asks for everything. Returns figures."""
    wrong: list[str] = []

    def asked(name: str) -> float:
        begun = time.perf_counter()
        try:
            answer = server.client.request(**request_of(name))
            if answer.is_error or substance(answer) != expected[name]:
                wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")
        except httpx.HTTPError as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        return time.perf_counter() - begun

    begun = time.perf_counter()
    with Watch(server) as watch, ThreadPoolExecutor(clients) as threads:
        seconds = list(threads.map(asked, trace))
    whole = time.perf_counter() - begun
    watch.look()
    cards = server.cards()
    engines = {engine_of(name) for name in trace}
    cuts = statistics.quantiles(seconds, n=100)
    return {
        "requests": len(trace),
        "wrong": wrong,
        "seconds": whole,
        "p50": cuts[49],
        "p99": cuts[98],
        "longest": max(seconds),
        "slowest_load": watch.slowest_load,
        "loads": sum(cards[name]["loads"] for name in engines),
        "evictions": sum(cards[name]["evictions"] for name in engines),
        "samples": len(watch.taken),
        "samples_per_second": len(watch.taken) / whole,
        "most_bytes": max(watch.taken),
        "models": {
            name: {
                "requests": trace.count(name),
                "longest": max((s for s, of in zip(seconds, trace, strict=True) if of == name)),
                **{key: cards[name][key] for key in ("loads", "evictions", "failures")},
            }
            for name in sorted({*trace})
        },
    }


def goals_of(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Goals: what each asks for, what was found, and whether it is met."""
    slowest = figures["slowest_load"]
    found = {
        "wrong answers": (len(figures["wrong"]), 0),
        "most memory / budget": (figures["most_bytes"] / figures["budget"], 1.02),
        "loads / Belady's": (figures["loads"] / figures["belady"], 1.5),
        "p99 / slowest load": (figures["p99"] / slowest, 10),
        # Nobody starves.
        "longest / slowest load": (figures["longest"] / slowest, 10),
    }
    return {
        name: {"found": value, "most": most, "met": value <= most}
        for name, (value, most) in found.items()
    }


def report(figures: Mapping[str, Any]) -> None:
    waits = figures["longest"] / figures["slowest_load"]
    print(
        "| requests | wrong | seconds | p50 | p99 | longest | slowest load | longest / slowest | "
        "loads | Belady's | loads / Belady's | most memory |"
    )
    print("|---" * 12 + "|")
    print(
        f"| {figures['requests']} | {len(figures['wrong'])} | {figures['seconds']:.0f} | "
        f"{figures['p50']:.3f} | {figures['p99']:.2f} | {figures['longest']:.1f} | "
        f"{figures['slowest_load']:.1f} | {waits:.1f} | {figures['loads']} | {figures['belady']} | "
        f"{figures['loads'] / figures['belady']:.2f} | {as_size(figures['most_bytes'])} of "
        f"{as_size(figures['budget'])}: {figures['most_bytes'] / figures['budget']:.3f} |"
    )
    print(f"{figures['samples_per_second']:.1f} samples of the memory in a second")
    for name, goal in figures["goals"].items():
        print(f"{name}: {goal['found']:.3g} of {goal['most']}{'' if goal['met'] else ': MISSED'}")
    for text in figures["wrong"][:10]:
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--hold", type=int, default=3, help="engines that the budget holds")
    parser.add_argument("--turn", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        models = checkpoints(folder)
        options: dict[str, Any] = {name: {"options": OPTIONS} for name in models}
        options["chat"]["adapters"] = save_adapters(folder)
        file = write_models(folder / "models.yaml", models, **options)
        roomy = ("--models-memory", "32GiB", "--admin-routes")
        with served(folder, "--models", file, *roomy) as server:
            expected = {name: substance(server.ask(name)) for name in ORDER}
            sizes = alone(server)
        budget = sum(sorted(sizes.values())[-args.hold :])
        weights = [1 / (place + 1) for place in range(len(ORDER))]
        trace = random.Random(args.seed).choices(ORDER, weights, k=args.requests)
        with served(
            folder,
            *("--models", file, "--models-memory", str(budget), "--models-timeout", "600"),
            *("--models-turn", str(args.turn), "--no-access-log"),
        ) as server:
            server.client.timeout = 700
            figures = measure(server, trace, expected, args.clients)
    engines = list(map(engine_of, trace))
    figures |= {"budget": budget, "sizes": sizes, "belady": belady(engines, sizes, budget)}
    figures["options"] = {name: value for name, value in vars(args).items() if name != "json"}
    figures["goals"] = goals_of(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures), encoding="utf-8")
    report(figures)


if __name__ == "__main__":
    main()
