"""`toolkit serve tiny` on a card: a chat, 64 seeded streams at once, a schema, metrics, a killed
engine, SIGTERM.

usage: python -m gpu_kit.server [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from http_client import Reply, exchange, fetch
from server_process import ServerProcess

from gpu_kit.report import MissedError, checking, die_with_the_kit

STREAMS = 64
CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["cat", "dog"]}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 16, **fields}


def answered(reply: Reply) -> Mapping[str, Any]:
    if reply.status != 200:
        raise MissedError(f"status {reply.status}: {reply.body[:500].decode(errors='replace')}")
    return reply.json()


async def ask(port: int, **fields: Any) -> str:
    """The text of an answer."""
    reply = answered(await fetch(port, "POST", CHAT, chat("What is a cat?", **fields)))
    return reply["choices"][0]["message"]["content"]


async def stream(port: int, seed: int) -> tuple[str, float]:
    """A streamed text, and the seconds to its first piece."""
    body = chat(
        f"Tell me of {seed} cats",
        stream=True,
        temperature=0.9,
        top_p=0.9,
        seed=seed,
        ignore_eos=True,
    )
    begun = time.perf_counter()
    first = 0.0
    text = ""
    async with exchange(port, "POST", CHAT, json.dumps(body).encode()) as one:
        if await one.head() != 200:
            raise MissedError(
                f"a stream has status {one.status}: "
                f"{(await one.body())[:500].decode(errors='replace')}"
            )
        async for event in one.events():
            if event == b"[DONE]":
                return text, first
            data = json.loads(event)
            if "error" in data:
                raise MissedError(f"a stream ended with {data['error']}")
            piece = "".join(choice["delta"].get("content") or "" for choice in data["choices"])
            first = first or (time.perf_counter() - begun if piece else 0.0)
            text += piece
    raise MissedError("a stream ended without [DONE]")


async def check_streams(port: int, found: dict[str, Any]) -> None:
    """The same seeds give the same texts in a second turn, and alone."""
    turns = []
    for _ in range(2):
        begun = time.perf_counter()
        turns.append(await asyncio.gather(*(stream(port, seed) for seed in range(STREAMS))))
        found["seconds_of_all"] = round(time.perf_counter() - begun, 3)
    first, second = ([text for text, _ in turn] for turn in turns)
    found["first_token_ms"] = round(1000 * statistics.median(seconds for _, seconds in turns[1]), 1)
    alone, seconds = await stream(port, 7)
    found["first_token_alone_ms"] = round(1000 * seconds, 1)
    others = [
        seed
        for seed in range(STREAMS)
        if first[seed] != second[seed] or (seed == 7 and alone != first[seed])
    ]
    if others:
        raise MissedError(f"other texts by the same seeds: {others}")
    if len(set(first)) < STREAMS // 2:
        raise MissedError(f"{len(set(first))} different texts by {STREAMS} seeds")


async def check_schema(port: int, found: dict[str, Any]) -> None:
    given = {
        "type": "json_schema",
        "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True},
    }
    text = await ask(port, response_format=given, max_tokens=64)
    found["text"] = text
    pet = json.loads(text)
    if (
        set(pet) != {"name", "age"}
        or pet["name"] not in ("cat", "dog")
        or pet["age"] not in (1, 2, 3)
    ):
        raise MissedError("it is not as the schema has it")


async def check_metrics(server: ServerProcess, found: dict[str, Any]) -> None:
    text = (await fetch(server.port, "GET", "/metrics")).body.decode()
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("toolkit_lm_") and "generation_tokens_total" in line
    ]
    found["generated"] = sum(float(row.rsplit(" ", 1)[1]) for row in rows)
    if found["generated"] < 2 * STREAMS * 16:
        raise MissedError(f"fewer tokens are counted than were streamed: {rows}")


async def check_killed(server: ServerProcess, expected: str, found: dict[str, Any]) -> None:
    """kill -9 of the engine: it is started anew, and says the same."""
    engines = [
        one
        for one in server.processes()
        if one.pid != server.process.pid and "engine" in " ".join(one.cmdline())
    ]
    if not engines:
        raise MissedError(f"no engine is among {[one.cmdline()[:4] for one in server.processes()]}")
    begun = time.perf_counter()
    engines[0].kill()
    await asyncio.to_thread(engines[0].wait, 30)
    while (
        await fetch(server.port, "GET", "/ready")
    ).status == 200 and time.perf_counter() - begun < 5:
        await asyncio.sleep(0.02)
    await server.wait_ready()
    found["back_after"] = round(time.perf_counter() - begun, 2)
    if (text := await ask(server.port)) != expected:
        raise MissedError(f"it says {text!r}, and said {expected!r}")


async def check_all(server: ServerProcess) -> None:
    expected: str | None = None
    with checking("health"):
        answered(await fetch(server.port, "GET", "/health"))
    with checking("a chat") as found:
        found["text"] = expected = await ask(server.port)
    with checking(f"{STREAMS} seeded streams") as found:
        await check_streams(server.port, found)
    with checking("an answer by a schema") as found:
        await check_schema(server.port, found)
    with checking("metrics") as found:
        await check_metrics(server, found)
    with checking("kill -9 of the engine") as found:
        if expected is None:
            raise MissedError("no chat was answered before")
        await check_killed(server, expected, found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    die_with_the_kit()
    with tempfile.TemporaryDirectory() as folder:
        server = None
        with checking("start") as found:
            begun = time.perf_counter()
            # In float32 a neighbour in the batch changes no draw.
            options = (
                "--device",
                args.device,
                "--dtype",
                "float32",
                "--max-num-seqs",
                str(STREAMS),
                "--max-model-len",
                "512",
            )
            server = ServerProcess(Path(folder), "tiny", *options, "--restart-engine", "1")
            asyncio.run(server.wait_ready())
            found["ready_after"] = round(time.perf_counter() - begun, 2)
        if server is None:
            return
        asyncio.run(check_all(server))
        with checking("SIGTERM") as found:
            code = server.stop()
            # Some versions of torch make a folder for its cache when they are imported.
            found["left"] = [
                one for one in server.left_behind() if not one.startswith("torchinductor_")
            ]
            if code or found["left"]:
                raise MissedError(f"exit code {code}")


if __name__ == "__main__":
    main()
