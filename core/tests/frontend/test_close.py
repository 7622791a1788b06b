"""`close` means the same of all faces."""

from __future__ import annotations

import asyncio

import pytest
from toolkit_lm import LLM, AsyncLLM, LLMEngine, VllmConfig
from toolkit_lm.errors import EngineDeadError

HERE = {"model": "tiny", "max_model_len": 64, "engine_process": False}


async def ask(llm: AsyncLLM) -> None:
    async for _ in llm.generate("a"):
        pass


ASK = {
    LLM: lambda face: face.generate("a"),
    LLMEngine: lambda face: face.add_request("1", "a"),
    AsyncLLM: lambda face: asyncio.run(ask(face)),
}


def made(face):
    return LLM(**HERE) if face is LLM else face(VllmConfig.make(**HERE))


@pytest.mark.parametrize("face", ASK, ids=lambda face: face.__name__)
def test_close(face):
    one = made(face)
    one.close()
    one.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        ASK[face](one)
    if face is AsyncLLM:
        asyncio.run(one.aclose())


@pytest.mark.parametrize("face", ASK, ids=lambda face: face.__name__)
def test_the_end_of_a_block_closes(face):
    one = made(face)

    async def block() -> None:
        async with one:
            pass

    if face is AsyncLLM:
        asyncio.run(block())
    else:
        with one:
            pass
    with pytest.raises(EngineDeadError, match="shut down"):
        ASK[face](one)
