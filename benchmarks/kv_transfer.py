"""Measures the first token of a long prompt that another server computes, and the transfer of its
KV blocks alone.

usage: python benchmarks/kv_transfer.py [--model FOLDER] [--tokens 6000] [--chunk 2048] [--rounds 5]

The model is m1 of race.py, a Llama of 153 M parameters, unless FOLDER names another. Two servers
on this machine share nothing but their transfers, with a thread each. A prompt has the tokens of no
other. *alone*: one server computes it. *afterwards*: a client has the prompt computed by the one
server, then asks the other. *at once*: it asks both, and blocks move after each chunk of the
prompt.

The second table has the blocks alone: a process holds them, another fetches them, encrypted over
TCP and through memory that both share. Shown are medians. Figures count only on a machine that does
nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from checkpoints import make_llama_160m
from server_process import ServerProcess
from toolkit_lm_kv_transfer.arena import SharedMemory
from toolkit_lm_kv_transfer.client import Client, Patience
from toolkit_lm_kv_transfer.held import Held
from toolkit_lm_kv_transfer.server import Server
from toolkit_lm_kv_transfer.settings import Address, parse
from toolkit_lm_kv_transfer.share import RankCounts

_SECRET = "a secret of the benchmark alone"
_KEY = _IDENTITY = bytes(32)
_BLOCK = 16
"""Tokens of a block."""
_BYTES_PER_TOKEN = 12 * 2 * 4 * 64 * 2
"""Of m1: layers, keys and values, heads, their size, bfloat16."""
_WAYS = ("alone", "afterwards", "at once")


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        hold(parse("hold", options.hold), options.tokens)
        return
    found = {"blocks": blocks(options)}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or str(make_llama_160m(Path(folder) / "m1", options.tokens + 64))
        found["first token"] = asyncio.run(first_tokens(options, model, Path(folder)))
    for name, figures in found.items():
        print(f"{name}, {options.tokens} tokens: median seconds of {options.rounds} rounds")
        for way, seconds in figures.items():
            print(f"  {way:12}{seconds:10.4f}")


# The first token


async def first_tokens(options: argparse.Namespace, model: str, folder: Path) -> dict[str, float]:
    """Median seconds by way. The ways take turns."""
    address = f"127.0.0.1:{free_port()}"
    generator = random.Random(0)
    seconds: dict[str, list[float]] = {way: [] for way in _WAYS}
    environ = {"OMP_NUM_THREADS": "1", "TOOLKIT_LM_KV_TRANSFER_SECRET": _SECRET}
    with ExitStack() as stack:
        urls = []
        for role in ("listen", "peers"):
            place = folder / role
            place.mkdir()
            words = (
                model,
                f"--kv-transfer-{role}",
                address,
                "--max-num-seqs",
                "2",
                "--max-num-batched-tokens",
                str(options.chunk),
            )
            server = ServerProcess(place, *words, environ=environ)
            stack.callback(server.process.kill)
            urls.append(f"http://127.0.0.1:{server.port}")
        async with aiohttp.ClientSession() as client:
            for number in range(options.rounds + 1):
                for way in _WAYS:
                    prompt = [generator.randrange(100, 200) for _ in range(options.tokens)]
                    took = await first_token(client, urls, prompt, way)
                    if number:
                        seconds[way].append(took)
    return {way: statistics.median(some) for way, some in seconds.items()}


async def first_token(
    client: aiohttp.ClientSession, urls: list[str], prompt: list[int], way: str
) -> float:
    """Seconds to the first token of a stream."""
    prefill, decode = urls
    start = time.perf_counter()
    params: dict[str, Any] | None = None
    asking = None
    offer = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
    if way == "afterwards":
        params = (await post(client, prefill, prompt, offer))["kv_transfer_params"]
    elif way == "at once":
        asking = asyncio.create_task(post(client, prefill, prompt, offer))
        params = {"do_remote_prefill": True, "transfer_id": str(start)}
    body = {"prompt": prompt, "max_tokens": 4, "stream": True, "ignore_eos": True}
    if params is not None:
        body["kv_transfer_params"] = params
    async with client.post(f"{decode}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.content.readuntil(b"\n\n")
        took = time.perf_counter() - start
        await answer.read()
    if asking is not None:
        await asking
    return took


async def post(
    client: aiohttp.ClientSession, url: str, prompt: list[int], fields: dict[str, Any]
) -> Any:
    body = {"prompt": prompt, "max_tokens": 1, **fields}
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


# The blocks alone


def blocks(options: argparse.Namespace) -> dict[str, float]:
    """Median seconds by way."""
    return {
        "TCP": statistics.median(fetches(options, shares=False)),
        "memory": statistics.median(fetches(options, shares=True)),
    }


def fetches(options: argparse.Namespace, *, shares: bool) -> list[float]:
    """Seconds of each fetch of all blocks."""
    address = Address("127.0.0.1", free_port())
    words = [sys.executable, __file__, "--hold", str(address), "--tokens", str(options.tokens)]
    with (
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        sharing(shares),
    ):
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        counts = RankCounts()
        sizes = [_BLOCK * _BYTES_PER_TOKEN]
        client = Client([address], _KEY, _IDENTITY, sizes, Patience(30, 60), counts)
        try:
            while not counts.reachable_peers:
                time.sleep(0.01)
            # The server hears that memory is shared.
            time.sleep(1.5)
            seconds = []
            for _ in range(options.rounds + 1):
                process.stdin.write("\n")
                process.stdin.flush()
                process.stdout.readline()
                start = time.perf_counter()
                for future in [client.fetch(key) for key in keys(options.tokens)]:
                    future.result()
                seconds.append(time.perf_counter() - start)
            assert counts.shared_blocks == (counts.fetched_blocks if shares else 0)
            return seconds[1:]
        finally:
            client.close()
            process.kill()


@contextmanager
def sharing(shares: bool) -> Iterator[None]:
    """A context in which arenas can be opened, or not."""
    opens = SharedMemory.__init__

    def refuse(self: SharedMemory, name: object) -> None:
        raise OSError("another machine")

    if not shares:
        SharedMemory.__init__ = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        SharedMemory.__init__ = opens  # type: ignore[method-assign]


def keys(num_tokens: int) -> list[tuple[int, bytes]]:
    return [(0, number.to_bytes(32, "big")) for number in range(num_tokens // _BLOCK)]


def hold(address: Address, num_tokens: int) -> None:
    """Holds all blocks anew for each line of its input."""
    size = _BLOCK * _BYTES_PER_TOKEN
    held = Held(2**30, 600.0)
    server = Server(address, _KEY, _IDENTITY, held, RankCounts())
    print("ready", flush=True)
    for _ in sys.stdin:
        for key in keys(num_tokens):
            room = held.make_room(size)
            assert room is not None
            room.data[:] = os.urandom(64) * (size // 64)
            held.put(key, room, time.monotonic())
        print("held", flush=True)
    server.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    main()
