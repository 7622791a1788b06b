"""Time that the router adds to a request, against stub backends that answer at once.

usage: python benchmarks/router.py [--requests 2000] [--backends 4] [--concurrency 1 8] [--json]

The stub, the router and the client are processes of their own. Each request is a chat of about
2 kB that is answered by a stream of one event; half of them go to the stub, half through the
router, in turn. The difference of the percentiles is what the router adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

STUB = r"""
import asyncio, json, sys
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
        if head.startswith(b"post"):
            kind, body = b"text/event-stream", EVENTS
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            size = b"Transfer-Encoding: chunked"
        else:
            kind, body = b"application/json", HEALTH if b"/health" in head else MODELS
            size = b"Content-Length: %d" % len(body)
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n%b" % (kind, size, body))

async def main():
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0)
    print("at http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
BODY = json.dumps(
    {
        "model": "stub",
        "stream": True,
        "messages": [
            {"role": "system", "content": "You are a helpful assistant. " * 40},
            {"role": "user", "content": "What is the weather like? " * 30},
        ],
    }
)


@contextmanager
def running(*command: str) -> Iterator[str]:
    """A process that prints its URL."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"at (http://\S+)", line):
                yield found[1]
                return
        raise SystemExit(f"{command[0]} ended early")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def ask(client: aiohttp.ClientSession, url: str) -> float:
    start = time.perf_counter()
    async with client.post(
        f"{url}/v1/chat/completions", data=BODY, headers={"Content-Type": "application/json"}
    ) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    return time.perf_counter() - start


async def measure(
    stub: str, router: str, requests: int, concurrency: int
) -> dict[str, dict[str, float]]:
    """Milliseconds by percentile, of requests to a stub, and through the router."""
    times: dict[str, list[float]] = {stub: [], router: []}
    async with aiohttp.ClientSession() as client:

        async def work() -> None:
            for number in range(requests // concurrency):
                for url in (stub, router):
                    seconds = await ask(client, url)
                    # The first few make connections.
                    if number >= 20:
                        times[url].append(seconds)

        await asyncio.gather(*(work() for _ in range(concurrency)))
    return {
        name: {f"p{share}": percentile(times[url], share) for share in (50, 90, 99)}
        for name, url in (("stub", stub), ("router", router))
    }


def percentile(seconds: list[float], share: int) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) * share // 100, len(ordered) - 1)] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    toolkit = str(Path(sys.executable).with_name("toolkit"))
    with running(sys.executable, "-c", STUB) as stub:
        # One stub stands for all backends: its addresses differ by a path that it does not read.
        words = [w for n in range(arguments.backends) for w in ("--backend", f"{stub}/b{n}")]
        with running(toolkit, "route", *words, "--port", "0", "--no-access-log") as router:
            time.sleep(1)
            rows = [
                {"concurrency": c} | asyncio.run(measure(stub, router, arguments.requests, c))
                for c in arguments.concurrency
            ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("| requests at a time | | p50 ms | p90 ms | p99 ms |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        added = {name: row["router"][name] - row["stub"][name] for name in row["stub"]}
        for name, figures in (("stub", row["stub"]), ("router", row["router"]), ("added", added)):
            shown = " | ".join(f"{value:.2f}" for value in figures.values())
            print(f"| {row['concurrency']} | {name} | {shown} |")


if __name__ == "__main__":
    main()
