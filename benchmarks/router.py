"""Time and processor that the router adds to a request, and its throughput, against stubs.

usage: python benchmarks/router.py [--requests 2000] [--backends 4] [--concurrency 1 8]
    [--steps 50] [--json]

The stub, the routers and the client are processes of their own. Each request is a chat of about
2 kB that is answered by a stream of one event.

Time: stubs answer at once. A third of the requests go to the stub, through a router, and through
one that follows KV events, in turn. The differences of the percentiles are what the routers add.

Events: one more process publishes for all backends. Each tells of `--steps` steps a second of an
engine with 64 sequences. Prompts have 512 tokens, and answers 200. A step fills blocks of 16
tokens, begins prompts, and evicts as many blocks.

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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

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
PORT = sys.argv[3]
def sources(head):  # an engine of each backend, by the beginning of its requests
    name = head.split(b"/", 2)[1].decode()
    source = {"endpoint": "tcp://127.0.0.1:" + PORT, "topic": name}
    return json.dumps({"sources": [source]}).encode()
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
            if b"/kv_event_sources" in head:
                body = sources(head)
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


PUBLISHER = r"""
import itertools, sys, time
import msgspec, zmq
STEPS, NAMES = float(sys.argv[1]), sys.argv[2:]
NUM_SEQS, SIZE, PROMPT, ANSWER = 64, 16, 512, 200
NUM_BATCHES = 500  # of which the published ones are made, again and again

def stored(hashes, chunks):
    tokens = [hash % 32000 for hash in hashes for _ in range(SIZE)]
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": hashes[0] - 1,
        "token_ids": tokens, "block_size": SIZE, "lora_id": None, "medium": "GPU",
        "group_idx": 0, "kv_cache_spec_kind": "full_attention"}
    return event | ({"prompt_chunks": chunks} if chunks else {})

def batches():
    hashes, prompts, blocks = itertools.count(2**62), 0.0, 0.0
    held, made = [], []
    for _ in range(NUM_BATCHES):
        events, new = [], []
        prompts += NUM_SEQS / ANSWER
        blocks += NUM_SEQS / SIZE
        while blocks >= 1:
            blocks -= 1
            new.append(next(hashes))
            events.append(stored(new[-1:], []))
        while prompts >= 1:
            prompts -= 1
            own = [next(hashes) for _ in range(PROMPT // SIZE)]
            # A chunk of 512 bytes has 128 tokens, and those of the first 512 bytes 32.
            ends = [*range(2, 10, 2), *range(16, PROMPT // SIZE + 1, 8)]
            events.append(stored(own, [(own[end - 1] ^ 2**61, own[end - 1]) for end in ends]))
            new += own
        held += new
        # The cache is full from the first batch on: what was stored 100 batches ago goes.
        if len(made) >= 100:
            gone, held = held[:len(new)], held[len(new):]
            events += [{"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU",
                "group_idx": 0} for hash in gone]
        made.append(events)
    return [msgspec.msgpack.encode([time.time(), events, 0]) for events in made]

made = batches()
with zmq.Context() as context, context.socket(zmq.PUB) as socket:
    print("at http://127.0.0.1:%d" % socket.bind_to_random_port("tcp://127.0.0.1"), flush=True)
    start = time.perf_counter()
    for number in itertools.count():
        for place, name in enumerate(NAMES):
            # Engines do not step at once.
            due = start + (number + place / len(NAMES)) / STEPS
            time.sleep(max(due - time.perf_counter(), 0))
            payload = made[number % NUM_BATCHES]
            socket.send_multipart([name.encode(), number.to_bytes(8, "big"), payload])
"""


def body(application: int = 0) -> str:
    system = f"You are the helpful assistant {application}. " + "You are helpful. " * 60
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is the weather like? " * 30},
    ]
    return json.dumps({"model": "stub", "stream": True, "messages": messages})


BODIES = [body(application) for application in range(APPLICATIONS)]


class Started(NamedTuple):
    """A process that listens."""

    url: str
    process: psutil.Process


@contextmanager
def running(*command: str) -> Iterator[Started]:
    """The URL that a process prints, and the process."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"at (http://\S+)", line):
                yield Started(found[1], psutil.Process(process.pid))
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
    stub: str, routers: dict[str, Started], requests: int, concurrency: int
) -> dict[str, dict[str, float]]:
    """Milliseconds by percentile, of requests to a stub, and through each router."""
    urls = {"stub": stub, **{name: router.url for name, router in routers.items()}}
    times: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession() as client:

        async def work(first: int, last: int) -> None:
            for _ in range(first, last):
                for name, url in urls.items():
                    times[name].append(await ask(client, url))

        # The first few make connections.
        await asyncio.gather(*(work(0, 20) for _ in range(concurrency)))
        times = {name: [] for name in urls}
        before = {name: processor(router.process) for name, router in routers.items()}
        await asyncio.gather(*(work(0, requests // concurrency) for _ in range(concurrency)))
        seconds = {name: processor(r.process) - before[name] for name, r in routers.items()}
    shown = {
        name: {f"p{share}": percentile(times[name], share) for share in (50, 90, 99)}
        for name in urls
    }
    for name in routers:
        shown[name]["processor"] = seconds[name] / len(times[name]) * 1000
    return shown


async def followed(url: str) -> None:
    """Waits until a router has heard events of all backends, and shows that none was missed since
    it listened."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(60):
        while True:
            async with client.get(f"{url}/metrics") as answer:
                text = await answer.text()
            gaps = re.findall(r"^toolkit_lm_router_event_gaps_total{.*} (\S+)", text, re.M)
            # The first that is heard is none of the first that were published.
            if gaps and {float(gap) for gap in gaps} == {1.0}:
                chunks = re.search(r"^toolkit_lm_router_index_chunks (\S+)", text, re.M)
                assert chunks is not None and float(chunks[1]) > 0
                return
            await asyncio.sleep(0.1)


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
def routed(
    num_backends: int, seconds: float, steps: float = 0.0
) -> Iterator[tuple[list[str], dict[str, Started]]]:
    """URLs of backends, and routers in front of them: one, and one that follows events where there
    are `steps` a second. One stub stands for all backends: their addresses differ by a path."""
    toolkit = str(Path(sys.executable).with_name("toolkit"))
    names = [f"b{number:03}" for number in range(num_backends)]
    with ExitStack() as ending:
        port = "0"
        if steps:
            words = (sys.executable, "-c", PUBLISHER, str(steps), *names)
            port = ending.enter_context(running(*words)).url.rpartition(":")[2]
        words = (sys.executable, "-c", STUB, str(seconds), str(PLACES), port)
        stub = ending.enter_context(running(*words)).url
        backends = [f"{stub}/{name}" for name in names]
        given = [word for url in backends for word in ("--backend", url)]
        routers = {"router": (), "router, events": ("--kv-events",)}
        made = {
            name: ending.enter_context(
                running(toolkit, "route", *given, "--port", "0", "--no-access-log", *more)
            )
            for name, more in routers.items()
            if steps or not more
        }
        time.sleep(1)
        yield backends, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--backends", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=float, default=50.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with routed(arguments.backends, 0, arguments.steps) as (backends, routers):
        asyncio.run(followed(routers["router, events"].url))
        for concurrency in arguments.concurrency:
            row = measure(backends[0], routers, arguments.requests, concurrency)
            rows.append({"concurrency": concurrency} | asyncio.run(row))
        asyncio.run(followed(routers["router, events"].url))
    with routed(arguments.backends, SECONDS) as (backends, routers):
        both = [(backends, [routers["router"].url])[n % 2] for n in range(4)]
        concurrency = 2 * PLACES * arguments.backends
        found = [asyncio.run(throughput(urls, arguments.requests, concurrency)) for urls in both]
    if arguments.json:
        print(json.dumps({"times": rows, "throughput": found}, indent=1))
        return
    print("| requests at a time | | p50 ms | p90 ms | p99 ms | processor ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        concurrency = row.pop("concurrency")
        for name, figures in row.items():
            shown = " | ".join(f"{value:.2f}" for value in figures.values())
            print(f"| {concurrency} | {name} | {shown} |")
            if name != "stub":
                added = [f"{figures[share] - row['stub'][share]:.2f}" for share in row["stub"]]
                print(f"| {concurrency} | {name}: added | {' | '.join(added)} |")
    direct = sum(found[::2]) / 2
    through = sum(found[1::2]) / 2
    print(f"\nRequests a second: {direct:.0f} in turn, {through:.0f} through the router", end="")
    print(f" ({through / direct:.3f})")


if __name__ == "__main__":
    main()
