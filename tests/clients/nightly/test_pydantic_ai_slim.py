"""pydantic-ai-slim: an agent's loop over chats and over responses, streamed too, with results as a
tool's call and as structured output beside tools."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from weather import ANSWER, ASKED, NO_CALL, QUESTION, SKIES

KINDS = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])


class Report(BaseModel):
    warm: bool


def agent(url, key, kind, asked, output=str, extra=None):
    model = kind("tiny-tools", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    settings = {"temperature": 0, "extra_body": extra}
    made = Agent(model, output_type=output, model_settings=settings)

    @made.tool_plain
    def get_weather(city: str) -> dict:
        """The weather of a city."""
        asked.append(city)
        return SKIES.get(city, {"sky": "windy", "degrees": 8})

    return made


@KINDS
def test_a_loop(tools_url, key, kind):
    asked = []
    result = agent(tools_url, key, kind, asked).run_sync(QUESTION)
    assert (result.output, asked) == (ANSWER, ASKED)


@KINDS
def test_a_loop_that_is_streamed(tools_url, key, kind):
    asked = []

    async def run():
        async with agent(tools_url, key, kind, asked).run_stream(QUESTION) as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(run())) == ANSWER
    assert asked == ASKED


@KINDS
def test_structured_output_beside_tools(tools_url, key, kind):
    asked = []
    made = agent(tools_url, key, kind, asked, NativeOutput(Report))
    with pytest.raises(UsageLimitExceeded):
        made.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=1))
    assert asked == ASKED[:1]
    made = agent(tools_url, key, kind, asked, NativeOutput(Report), NO_CALL)
    assert isinstance(made.run_sync(QUESTION).output, Report) and asked == ASKED[:1]


@KINDS
def test_a_result_as_a_call(tools_url, key, kind):
    model = kind("tiny-tools", provider=OpenAIProvider(base_url=f"{tools_url}/v1", api_key=key))
    output = ToolOutput(Report, name="get_report")
    made = Agent(model, output_type=output, model_settings={"temperature": 0})
    assert isinstance(made.run_sync(QUESTION).output, Report)
