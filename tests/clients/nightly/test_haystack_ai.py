"""haystack-ai: an `Agent`'s loop, streamed too, and structured output of the chat generator."""

from __future__ import annotations

from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret
from pydantic import BaseModel
from weather import ANSWER, ASKED, QUESTION, SKIES


class Report(BaseModel):
    warm: bool


def generator(url, key, **options):
    options = {"temperature": 0, **options}
    return OpenAIChatGenerator(
        model="tiny-tools",
        api_base_url=f"{url}/v1",
        api_key=Secret.from_token(key),
        generation_kwargs=options,
    )


def agent(url, key, asked, **options):
    @tool
    def get_weather(city: str) -> dict:
        """The weather of a city."""
        asked.append(city)
        return SKIES.get(city, {"sky": "windy", "degrees": 8})

    return Agent(chat_generator=generator(url, key), tools=[get_weather], **options)


def test_a_loop(tools_url, key):
    asked = []
    result = agent(tools_url, key, asked).run(messages=[ChatMessage.from_user(QUESTION)])
    assert (result["last_message"].text, asked) == (ANSWER, ASKED)


def test_a_loop_that_is_streamed(tools_url, key):
    asked = []
    chunks = []
    made = agent(tools_url, key, asked, streaming_callback=chunks.append)
    result = made.run(messages=[ChatMessage.from_user(QUESTION)])
    assert (result["last_message"].text, asked) == (ANSWER, ASKED)
    assert ANSWER in "".join(chunk.content for chunk in chunks)


def test_structured_output(tools_url, key):
    replies = generator(tools_url, key, response_format=Report).run(
        [ChatMessage.from_user(QUESTION)]
    )["replies"]
    Report.model_validate_json(replies[0].text)
