"""llama-index-llms-openai-like: chats, completions, streams, structured output, tools, a
`FunctionAgent`'s loop."""

from __future__ import annotations

import asyncio

import pytest
from llama_index.core.agent.workflow import AgentStream, FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."
WEATHER = "It is sunny in Paris, 21 degrees. It is snowy in Tokyo, 3 degrees."


class Light(BaseModel, extra="forbid"):
    """Switches a light."""

    on: bool


@pytest.fixture
def model(url, key):
    return OpenAILike(
        model="tiny",
        api_base=f"{url}/v1",
        api_key=key,
        temperature=0,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=False,
        context_window=2048,
        max_tokens=100,
        max_retries=0,
    )


def test_chat(model):
    assert model.chat([ChatMessage(role="user", content=ASK)]).message.content == PARIS
    assert model.complete(ASK).text == PARIS
    *_, last = model.stream_chat([ChatMessage(role="user", content=ASK)])
    assert last.message.content == PARIS


def test_structured_output(model):
    assert isinstance(model.structured_predict(Light, PromptTemplate(ASK)), Light)
    assert isinstance(model.as_structured_llm(Light).complete(ASK).raw, Light)


def test_tools(model):
    def light(on: bool) -> str:
        """Switches a light."""
        return f"it is {'on' if on else 'off'}"

    reply = model.predict_and_call(
        [FunctionTool.from_defaults(light)], user_msg=ASK, tool_required=True
    )
    assert str(reply).startswith("it is ")


def test_an_agent_in_a_loop(tools_url, key):
    asked = []

    def get_weather(city: str) -> dict:
        """The weather of a city."""
        asked.append(city)
        return {"Paris": {"sky": "sunny", "degrees": 21}, "Tokyo": {"sky": "snowy", "degrees": 3}}[
            city
        ]

    async def run():
        model = OpenAILike(
            model="tiny-tools",
            api_base=f"{tools_url}/v1",
            api_key=key,
            temperature=0,
            is_chat_model=True,
            is_function_calling_model=True,
        )
        handler = FunctionAgent(tools=[get_weather], llm=model).run(
            "What is the weather in Paris and in Tokyo?"
        )
        text = [
            event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)
        ]
        return str(await handler), "".join(text)

    answer, streamed = asyncio.run(run())
    assert (answer, asked) == (WEATHER, ["Paris", "Tokyo"])
    assert streamed.endswith(WEATHER)
