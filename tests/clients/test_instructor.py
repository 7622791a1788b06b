"""instructor: models of pydantic by tools and by JSON schemas, streams of parts, async."""

from __future__ import annotations

import asyncio
from typing import Literal

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Which light is on?"}]
ONE = {"max_tokens": 100, "max_retries": 0, "temperature": 0}


class Light(BaseModel, extra="forbid"):
    """A tiny model would add to it for ever."""

    colour: Literal["red", "green"]
    on: bool


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "TOOLS_STRICT"])
def test_models(url, key, mode):
    client = instructor.from_openai(
        OpenAI(base_url=f"{url}/v1", api_key=key), mode=instructor.Mode[mode]
    )
    found = client.chat.completions.create(model="tiny", messages=ASK, response_model=Light, **ONE)
    assert isinstance(found, Light)
    *_, last = client.chat.completions.create_partial(
        model="tiny", messages=ASK, response_model=Light, **ONE
    )
    assert last.on in (True, False)


def test_async(url, key):
    client = instructor.from_openai(AsyncOpenAI(base_url=f"{url}/v1", api_key=key))
    found = asyncio.run(
        client.chat.completions.create(model="tiny", messages=ASK, response_model=Light, **ONE)
    )
    assert isinstance(found, Light)
