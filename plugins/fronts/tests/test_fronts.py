"""Fronts of one engine: each has its answers, whatever the others do."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
from PIL import Image
from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.engine import wire
from toolkit_lm.errors import ConfigError, EngineDeadError
from toolkit_lm_fronts.meeting import read_line
from toolkit_lm_tiny.drawings import draw

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
OPTIONS: dict[str, Any] = {"model": "tiny", "dtype": "float32", "device": "cpu"}
WORDS = ("tiny", "--dtype", "float32", "--device", "cpu")
LONG = SamplingParams(max_tokens=400, temperature=0.9, seed=5, ignore_eos=True)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Shared:
    """A running `toolkit engine`."""

    def __init__(self, path: Path, *words: str) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("toolkit")),
                *("engine", *words, "--listen", str(path)),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        end = time.monotonic() + 120
        while not path.exists() and self.process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert path.exists()

    def config(self, **options: Any) -> VllmConfig:
        where = {"plugin_option": {"fronts": {"engine": str(self.path)}}}
        return VllmConfig.make(**{**OPTIONS, **options}, **where)

    def end(self) -> int:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[Shared]:
    made = Shared(tmp_path_factory.mktemp("engine") / "socket", *WORDS)
    yield made
    assert made.end() == 0
    assert not made.path.exists()


async def text(llm: AsyncLLM, prompt: str, params: SamplingParams = LONG) -> str:
    last = ""
    async for output in llm.generate(prompt, params):
        last = output.outputs[0].text
    return last


async def test_fronts_have_their_own_answers(shared):
    """Both number their requests alike."""
    prompts = ["Once upon a time", "The sea", "A dog", "The capital of Italy is"]
    async with AsyncLLM(VllmConfig.make(**OPTIONS)) as alone:
        expected = [await text(alone, prompt) for prompt in prompts]
    async with AsyncLLM(shared.config()) as first, AsyncLLM(shared.config()) as second:
        found = await asyncio.gather(
            *(text(first, prompt) for prompt in prompts),
            *(text(second, prompt) for prompt in reversed(prompts)),
        )
        assert found == [*expected, *reversed(expected)]
        assert first.health().status == second.health().status == "ready"


FRONT = """
import asyncio, sys
from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig
config = VllmConfig.make(
    model="tiny", dtype="float32", device="cpu",
    plugin_option={"fronts": {"engine": sys.argv[1]}},
)
async def main():
    async with AsyncLLM(config) as llm:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        async for _ in llm.generate("a", params):
            print("a token", flush=True)
asyncio.run(main())
"""


async def test_the_death_of_one_touches_no_other(shared):
    async with AsyncLLM(VllmConfig.make(**OPTIONS)) as alone:
        expected = await text(alone, "The sea")
    async with AsyncLLM(shared.config()) as llm:
        answers = [asyncio.create_task(text(llm, "The sea")) for _ in range(4)]
        other = subprocess.Popen([sys.executable, "-c", FRONT, shared.path], stdout=subprocess.PIPE)
        assert other.stdout is not None
        assert await asyncio.to_thread(other.stdout.readline) == b"a token\n"
        other.kill()
        other.wait()
        other.stdout.close()
        assert await asyncio.gather(*answers) == [expected] * 4
        # The engine has room for all of its rows again.
        assert await text(llm, "The sea") == expected


def question(number: int) -> list[dict[str, Any]]:
    """Asks what is in a picture."""
    file = io.BytesIO()
    Image.fromarray(draw(Random(number), held_out=True).pixels()).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    picture = {"type": "image_url", "image_url": {"url": url}}
    content = [picture, {"type": "text", "text": "What is in this picture?"}]
    return [{"role": "user", "content": content}]


async def look(llm: AsyncLLM, number: int) -> str:
    last = ""
    async for output in llm.chat(question(number), SamplingParams(temperature=0, max_tokens=24)):
        last = output.outputs[0].text
    return last


async def test_pictures_are_never_mixed(tmp_path):
    """Each front has its own mirror of what the engine holds, and takes it along."""
    options = {**OPTIONS, "model": "tiny-vision"}
    order = [2, 3, 4, 2, 3, 4]
    async with AsyncLLM(VllmConfig.make(**options)) as alone:
        expected = {number: await look(alone, number) for number in order}
    assert len({*expected.values()}) == 3
    made = Shared(tmp_path / "socket", "tiny-vision", *WORDS[1:])
    try:
        async with AsyncLLM(made.config(model="tiny-vision")) as second:
            async with AsyncLLM(made.config(model="tiny-vision")) as first:
                found = await asyncio.gather(
                    *(look(first, number) for number in order),
                    *(look(second, number) for number in reversed(order[:4])),
                )
                wanted = [*order, *reversed(order[:4])]
                assert found == [expected[number] for number in wanted]
            # The pictures of the first are gone, and those of the second are not.
            for number in order:
                assert await look(second, number) == expected[number]
    finally:
        assert made.end() == 0


@pytest.mark.parametrize(
    "message",
    [b"", b"\xff" * 40, b"\x80", wire.encode(wire.ResetPrefixCache()), wire.encode(wire.add([]))],
    ids=["nothing", "nonsense", "no tag", "before the start", "requests before the start"],
)
async def test_a_front_that_says_nonsense_is_sent_away(shared, message):
    async with AsyncLLM(shared.config()) as llm:
        asking = asyncio.create_task(text(llm, "The sea"))
        context = zmq.Context()
        with socket.socket(socket.AF_UNIX) as lifeline:
            lifeline.settimeout(30)
            lifeline.connect(str(shared.path))
            pair = wire.make_socket(context)
            pair.connect(json.loads(read_line(lifeline))["address"])
            pair.send(message)
            assert lifeline.recv(1) == b""
            pair.close(linger=0)
        context.term()
        assert await asking == await text(llm, "The sea")


async def test_a_front_that_asks_for_another_engine_is_refused(shared):
    with pytest.raises(ConfigError, match=r"max_num_seqs is .* there, and 3 in the front"):
        AsyncLLM(shared.config(max_num_seqs=3))
    with pytest.raises(ConfigError, match="data_parallel_size"):
        AsyncLLM(shared.config(data_parallel_size=2))
    with pytest.raises(ConfigError, match=r"no engine answers at .*socket\.none"):
        where = {"plugin_option": {"fronts": {"engine": f"{shared.path}.none"}}}
        AsyncLLM(VllmConfig.make(**OPTIONS, **where))


async def test_the_engines_end_is_told_to_all(tmp_path):
    made = Shared(tmp_path / "socket", *WORDS)
    async with AsyncLLM(made.config()) as first, AsyncLLM(made.config()) as second:
        begun = asyncio.Event()

        async def ask(llm: AsyncLLM) -> None:
            async for _ in llm.generate("a", LONG):
                begun.set()

        asking = [asyncio.create_task(ask(llm)) for llm in (first, second)]
        await begun.wait()
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()
        for task in asking:
            with pytest.raises(EngineDeadError):
                await task
