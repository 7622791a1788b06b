"""autogen-agentchat: an `AssistantAgent`'s loop, streamed too, and structured output."""

from __future__ import annotations

import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel
from weather import ANSWER, ASKED, NO_CALL, QUESTION, SKIES


class Report(BaseModel):
    warm: bool


def agent(url, key, asked, extra=None, **options):
    async def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return json.dumps(SKIES.get(city, {"sky": "windy", "degrees": 8}))

    client = OpenAIChatCompletionClient(
        model="tiny-tools",
        base_url=f"{url}/v1",
        api_key=key,
        temperature=0,
        **(extra or {}),
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": "unknown",
            "structured_output": True,
        },
    )
    return AssistantAgent(
        "weather",
        model_client=client,
        tools=[FunctionTool(get_weather, "The weather of a city.", strict=True)],
        system_message=None,
        **{"max_tool_iterations": 4} | options,
    )


def test_a_loop(tools_url, key):
    asked = []
    result = asyncio.run(agent(tools_url, key, asked).run(task=QUESTION))
    assert (result.messages[-1].content, asked) == (ANSWER, ASKED)


def test_a_loop_that_is_streamed(tools_url, key):
    asked = []

    async def run():
        made = agent(tools_url, key, asked, model_client_stream=True)
        return [event async for event in made.run_stream(task=QUESTION)]

    events = asyncio.run(run())
    assert (events[-1].messages[-1].content, asked) == (ANSWER, ASKED)
    chunks = [event.content for event in events if event.__class__.__name__.endswith("ChunkEvent")]
    assert ANSWER in "".join(chunks)


def test_structured_output_beside_tools(tools_url, key):
    asked = []
    made = agent(tools_url, key, asked, output_content_type=Report, max_tool_iterations=1)
    asyncio.run(made.run(task=QUESTION))
    assert asked == ASKED[:1]
    made = agent(tools_url, key, asked, NO_CALL, output_content_type=Report)
    result = asyncio.run(made.run(task=QUESTION))
    assert isinstance(result.messages[-1].content, Report) and asked == ASKED[:1]
