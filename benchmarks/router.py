"""Time and processor that the router adds to a request, and its throughput, against stubs.

usage: python benchmarks/router.py [--requests 2000] [--backends 4] [--concurrency 1 8] [--json]

The stub, the router and the client are processes of their own. Each request is a chat of about
2 kB that is answered by a stream of one event.

Time: stubs answer at once. Half of the requests go to the stub, half through the router, in turn.
The difference of the percentiles is what the router adds.

Throughput: each backend computes for 50 ms, 8 requests at a time, and all have twice as many under
way. The same requests go to the backends in turn, and through the router.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import psutil

SECONDS = 0.05
PLACES = 8
"""Seconds for which a backend computes each request, and requests that it computes at a time."""
APPLICATIONS = 64
"""Prompts that begin alike."""
STUB = r"""
import asyncio, heapq, json, sys
SECONDS, PLACES = float(sys.argv[1]), int(sys.argv[2])
FREE = {}  # when each place of a backend is free, by the beginning of its requests
HEALTH = b'{"status": "ready"}'
MODELS = json.dumps({"object": "list", "data": [
    {"id": "stub", "owned_by": "toolkit-lm", "created": 1}]}).encode()
EVENTS = b'data: {"id":"x","created":1,"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
EVENTS += b'data: [DONE]\n\n'

class Stub(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.held = b""
    def data_received(self, data):
        self.held += data
        while (end := self.held.find(b"\r\n\r\n")) >= 0:
            head = self.held[:end].lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r\n")[0]) if at >= 0 else 0
            if len(self.held) < end + 4 + length:
                return
            self.held = self.held[end + 4 + length :]
            self.answer(head)
    def answer(self, head):
        is_post = head.startswith(b"post")
        if is_post:
            kind, body = b"text/event-stream", EVENTS
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            size = b"Transfer-Encoding: chunked"
        else:
            kind, body = b"application/json", HEALTH if b"/health" in head else MODELS
            size = b"Content-Length: %d" % len(body)
        made = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n%b" % (kind, size, body)
        if not is_post or not SECONDS:
            self.transport.write(made)
            return
        loop = asyncio.get_running_loop()
        places = FREE.setdefault(head.split(b"/v1/")[0], [0.0] * PLACES)
        end = max(loop.time(), heapq.heappop(places)) + SECONDS
        heapq.heappush(places, end)
        loop.call_at(end, self.transport.write, made)

async def main():
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print("at http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


def body(application: int = 0) -> str:
    system = f"You are the helpful assistant {application}. " + "You are helpful. " * 60
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is the weather like? " * 30},
    ]
    return json.dumps({"model": "stub", "stream": True, "messages": messages})


BODIES = [body(application) for application in range(APPLICATIONS)]


@contextmanager
def running(*command: str) -> Iterator[tuple[str, psutil.Process]]:
    """The URL that a process prints, and the process."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"at (http://\S+)", line):
                yield found[1], psutil.Process(process.pid)
                return
        raise SystemExit(f"{command[0]} ended early")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def processor(process: psutil.Process) -> float:
    """Seconds of a processor that the process has had."""
    times = process.cpu_times()
    return times.user + times.system


async def ask(client: aiohttp.ClientSession, url: str, number: int = 0) -> float:
    start = time.perf_counter()
    async with client.post(
        f"{url}/v1/chat/completions",
        data=BODIES[number % APPLICATIONS],
        headers={"Content-Type": "application/json"},
    ) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return time.perf_counter() - start


async def measure(
    stub: str, router: str, process: psutil.Process, requests: int, concurrency: int
) -> dict[str, dict[str, float]]:
    """Milliseconds by percentile, of requests to a stub, and through the router."""
    times: dict[str, list[float]] = {stub: [], router: []}
    async with aiohttp.ClientSession() as client:

        async def work(first: int, last: int) -> None:
            for _ in range(first, last):
                for url in (stub, router):
                    times[url].append(await ask(client, url))

        # The first few make connections.
        await asyncio.gather(*(work(0, 20) for _ in range(concurrency)))
        times = {stub: [], router: []}
        before = processor(process)
        await asyncio.gather(*(work(0, requests // concurrency) for _ in range(concurrency)))
        seconds = processor(process) - before
    shown = {
        name: {f"p{share}": percentile(times[url], share) for share in (50, 90, 99)}
        for name, url in (("stub", stub), ("router", router))
    }
    shown["router"]["processor"] = seconds / len(times[router]) * 1000
    return shown


async def throughput(urls: list[str], requests: int, concurrency: int) -> float:
    """Requests a second that are answered, sent to the URLs in turn."""
    numbers = itertools.count()

    async def work(client: aiohttp.ClientSession) -> None:
        while (number := next(numbers)) < requests:
            await ask(client, urls[number % len(urls)], number)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        start = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
        return requests / (time.perf_counter() - start)


def percentile(seconds: list[float], share: int) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)] * 1000


@contextmanager
def routed(num_backends: int, seconds: float) -> Iterator[tuple[list[str], str, psutil.Process]]:
    """URLs of backends and of a router in front of them, and its process. One stub stands for all
    backends: their addresses differ by a path."""
    toolkit = str(Path(sys.executable).with_name("toolkit"))
    with running(sys.executable, "-c", STUB, str(seconds), str(PLACES)) as (stub, _):
        backends = [f"{stub}/b{number}" for number in range(num_backends)]
        words = [word for url in backends for word in ("--backend", url)]
        with running(toolkit, "route", *words, "--port", "0", "--no-access-log") as router:
            time.sleep(1)
            yield backends, *router


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with routed(arguments.backends, 0) as (backends, router, process):
        for concurrency in arguments.concurrency:
            row = measure(backends[0], router, process, arguments.requests, concurrency)
            rows.append({"concurrency": concurrency} | asyncio.run(row))
    with routed(arguments.backends, SECONDS) as (backends, router, process):
        both = [(backends, [router])[n % 2] for n in range(4)]
        concurrency = 2 * PLACES * arguments.backends
        found = [asyncio.run(throughput(urls, arguments.requests, concurrency)) for urls in both]
    if arguments.json:
        print(json.dumps({"times": rows, "throughput": found}, indent=1))
        return
    print("| requests at a time | | p50 ms | p90 ms | p99 ms | processor ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        added = {name: row["router"][name] - row["stub"][name] for name in row["stub"]}
        for name, figures in (("stub", row["stub"]), ("router", row["router"]), ("added", added)):
            shown = " | ".join(f"{value:.2f}" for value in figures.values())
            print(f"| {row['concurrency']} | {name} | {shown} |")
    direct = sum(found[::2]) / 2
    through = sum(found[1::2]) / 2
    print(f"\nRequests a second: {direct:.0f} in turn, {through:.0f} through the router", end="")
    print(f" ({through / direct:.3f})")


if __name__ == "__main__":
    main()
