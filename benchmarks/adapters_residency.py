"""Measures adapters that share memory and steps: more of them than a step may have, a rare one
beside a flood, loads and unloads under load, and a start with a thousand.

usage: python benchmarks/adapters_residency.py [--model FOLDER] [--only slots,flood,loads,start]
                                               [--seconds 20] [--rounds 3] [--loads 200]

    slots  first tokens of 32 streams with 16 adapters, of which a step may have 8, beside all 16
    flood  the longest wait of a rare adapter's requests, beside 31 streams with 15 others on 4
    loads  loads and unloads under 32 streams: answers that were lost, and memory of the process
    start  a server's start with 1,000 registered adapters, beside none

Engines of `slots` run by turns, in rounds. The adapters are random, of all linear layers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from adapters import make_adapter
from checkpoints import VOCAB_SIZE, make_llama_160m

PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32


@asynccontextmanager
async def started(model: Path, most: int, folder: Path | None = None) -> AsyncIterator[Any]:
    """An engine in this process, whose steps may have `most` adapters."""
    from toolkit_lm import AsyncLLM, VllmConfig

    own: dict[str, Any] = {"enabled": True, "max_adapters": most}
    if folder is not None:
        own["folder"] = str(folder)
    config = VllmConfig.make(
        model=str(model),
        engine_process=False,
        max_model_len=512,
        max_num_seqs=32,
        kv_cache_memory="512MiB",
        enable_prefix_caching=False,
        served_model_name=["base"],
        plugin_option={"lora": own},
    )
    async with AsyncLLM(config) as engine:
        yield engine


async def first_token(engine: Any, adapter: Path | None, draws: random.Random) -> float:
    """Seconds of one request until its first token. The request is read to its end."""
    from toolkit_lm import SamplingParams
    from toolkit_lm_lora.front import LoRARequest

    prompt = {"prompt_token_ids": [draws.randrange(10, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]}
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    request = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter))
    begun = time.perf_counter()
    waited = 0.0
    async for output in engine.generate(prompt, params, lora_request=request):
        assert not output.error, output.error
        if not waited and output.outputs[0].token_ids:
            waited = time.perf_counter() - begun
    return waited


async def streams(
    engine: Any, adapters: Sequence[Path | None], seconds: float, seed: int
) -> list[list[float]]:
    """Seconds until the first token, of each stream's requests, one after the other."""
    end = time.perf_counter() + seconds

    async def stream(number: int) -> list[float]:
        draws = random.Random(f"{seed} {number}")
        found = []
        while time.perf_counter() < end:
            found.append(await first_token(engine, adapters[number], draws))
        # The first ones of all streams come at once.
        return found[1:] or found

    return await asyncio.gather(*(stream(number) for number in range(len(adapters))))


async def slots(model: Path, adapters: Sequence[Path], seconds: float, rounds: int) -> None:
    of_streams = [adapters[number % 16] for number in range(32)]
    found: dict[int, list[float]] = {}
    counts: dict[int, int] = {}
    async with started(model, 8) as few, started(model, 16) as all_:
        engines = {8: few, 16: all_}
        for engine in engines.values():
            await streams(engine, of_streams, 1, 99)
        for turn in range(rounds):
            for most in (8, 16) if turn % 2 else (16, 8):
                waits = await streams(engines[most], of_streams, seconds, turn)
                found.setdefault(most, []).append(statistics.median(chain(*waits)))
                counts[most] = counts.get(most, 0) + sum(map(len, waits))
    ratio = statistics.median(a / b for a, b in zip(found[8], found[16], strict=True))
    print("| adapters | a step may have | first token, p50 | requests |\n|---|---|---|---|")
    for most in (16, 8):
        shown = statistics.median(found[most]) * 1e3
        print(f"| 16 | {most} | {shown:.0f} ms | {counts[most]} |")
    print(f"first token with 8 over that with 16, by pairs: {ratio:.2f} (goal: at most 2)")


async def flood(model: Path, adapters: Sequence[Path], seconds: float) -> None:
    of_streams = [*(adapters[number % 15] for number in range(31)), adapters[15]]
    async with started(model, 4) as engine:
        await streams(engine, of_streams, 1, 99)
        *others, rare = await streams(engine, of_streams, seconds, 1)
    together = [*chain(*others)]
    print(
        f"rare adapter beside a flood: first token p50 {statistics.median(rare):.3f} s, longest "
        f"{max(rare):.3f} s of {len(rare)}; others p50 {statistics.median(together):.3f} s, "
        f"longest {max(together):.3f} s of {len(together)}"
    )


def resident_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in status if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


async def loads(model: Path, adapters: Sequence[Path], count: int) -> None:
    import httpx
    from toolkit_lm_server.app import create_app
    from toolkit_lm_server.options import ServerOptions

    folder = adapters[0].parent
    prompt = [(7 * number) % 1000 + 10 for number in range(16)]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    lost = answered = 0
    sizes = []
    async with started(model, 8, folder) as engine:
        app = create_app(engine, ServerOptions(admin_routes=True))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", timeout=600
        ) as client:
            names = ["base", *(path.name for path in adapters[:7])]
            expected = {}
            for name in names:
                answer = await client.post("/v1/completions", json=body | {"model": name})
                expected[name] = answer.json()["choices"][0]["text"]
            done = False

            async def stream(name: str) -> None:
                nonlocal lost, answered
                while not done:
                    answer = await client.post("/v1/completions", json=body | {"model": name})
                    answered += 1
                    is_right = answer.status_code == 200
                    lost += not is_right or answer.json()["choices"][0]["text"] != expected[name]

            running = [asyncio.create_task(stream(names[number % 8])) for number in range(32)]
            for number in range(count):
                load = {"lora_name": f"hot{number}", "lora_path": adapters[8 + number % 8].name}
                found = await client.post("/v1/load_lora_adapter", json=load)
                assert found.status_code == 200, found.text
                asked = await client.post("/v1/completions", json=body | {"model": f"hot{number}"})
                assert asked.status_code == 200, asked.text
                gone = {"lora_name": f"hot{number}"}
                found = await client.post("/v1/unload_lora_adapter", json=gone)
                assert found.status_code == 200, found.text
                if number % max(1, count // 10) == 0:
                    gc.collect()
                    sizes.append(resident_mib())
            done = True
            await asyncio.gather(*running)
    shown = " ".join(f"{size:.0f}" for size in sizes)
    print(f"{count} loads and unloads under 32 streams: {lost} of {answered} answers lost or wrong")
    print(f"memory of the process, MiB, every {max(1, count // 10)} loads: {shown}")


def start(scratch: Path, rounds: int) -> None:
    """Seconds from a server's start to its first healthy answer, and CPU seconds of its processes
    until they end."""
    folder = scratch / "thousand"
    source = Path(str(files("toolkit_lm_tiny") / "adapter_pirate"))
    for number in range(1000):
        shutil.copytree(source, folder / f"a{number}", copy_function=os.link)
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(rounds):
        for has in (False, True) if turn % 2 else (True, False):
            more = ["--lora-dir", str(folder)] if has else ["--enable-lora"]
            taken[has].append(_start(more))
    for kind, name in enumerate(("seconds", "CPU seconds")):
        both = [[one[kind] for one in taken[has]] for has in (False, True)]
        apart = statistics.median(b - a for a, b in zip(*both, strict=True))
        without, with_ = map(statistics.median, both)
        print(
            f"start of tiny's server: {without:.2f} {name}, with 1,000 registered adapters "
            f"{with_:.2f}; by pairs {apart:+.2f} (goal: at most +1)"
        )


def _start(more: list[str]) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["-m", "toolkit_lm", "serve", "tiny", "--port", str(port), *more]
    begun = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not _is_healthy(port):
            assert server.poll() is None, f"the server ended with {server.returncode}"
            time.sleep(0.02)
        taken = time.perf_counter() - begun
    finally:
        server.terminate()
        server.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", default="slots,flood,loads,start")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--rank", type=int, default=16)
    given = parser.parse_args()
    wanted = given.only.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or make_llama_160m(Path(scratch) / "model")
        root = Path(scratch) / "adapters"
        adapters = [
            make_adapter(model, root / f"a{number}", given.rank, number) for number in range(16)
        ]
        if "slots" in wanted:
            asyncio.run(slots(model, adapters, given.seconds, given.rounds))
        if "flood" in wanted:
            asyncio.run(flood(model, adapters, given.seconds))
        if "loads" in wanted:
            asyncio.run(loads(model, adapters, given.loads))
        if "start" in wanted:
            start(Path(scratch), given.rounds)


if __name__ == "__main__":
    main()
