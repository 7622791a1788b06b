"""openai-agents: an agent's loop over chats and over responses, streamed too, with tools beside
structured output."""

from __future__ import annotations

import asyncio

import pytest
from agents import (
    Agent,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from weather import ANSWER, ASKED, NO_CALL, QUESTION, SKIES

set_tracing_disabled(True)


class Report(BaseModel):
    warm: bool


def agent(url, key, kind, asked, extra=None, **options):
    @function_tool
    def get_weather(city: str) -> dict:
        """The weather of a city."""
        asked.append(city)
        return SKIES.get(city, {"sky": "windy", "degrees": 8})

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = kind(model="tiny-tools", openai_client=client)
    return Agent(
        name="Weather",
        tools=[get_weather],
        model=model,
        model_settings=ModelSettings(temperature=0, extra_body=extra),
        **options,
    )


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_a_loop(tools_url, key, kind):
    asked = []
    result = asyncio.run(Runner.run(agent(tools_url, key, kind, asked), QUESTION))
    assert (result.final_output, asked) == (ANSWER, ASKED)


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_a_loop_that_is_streamed(tools_url, key, kind):
    asked = []

    async def run():
        streamed = Runner.run_streamed(agent(tools_url, key, kind, asked), QUESTION)
        text = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        return streamed.final_output, "".join(text)

    assert asyncio.run(run()) == (ANSWER, ANSWER)
    assert asked == ASKED


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_tools_beside_structured_output(tools_url, key, kind):
    asked = []
    made = agent(tools_url, key, kind, asked, output_type=Report)
    with pytest.raises(MaxTurnsExceeded):
        asyncio.run(Runner.run(made, QUESTION, max_turns=1))
    assert asked == ASKED[:1]
    made = agent(tools_url, key, kind, asked, NO_CALL, output_type=Report)
    result = asyncio.run(Runner.run(made, QUESTION))
    assert isinstance(result.final_output, Report) and asked == ASKED[:1]
