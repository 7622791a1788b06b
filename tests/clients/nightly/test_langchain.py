"""langchain: `create_agent`'s loop, streamed too, with results of a schema beside tools."""

from __future__ import annotations

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel
from weather import ANSWER, ASKED, NO_CALL, QUESTION, SKIES

MESSAGES = {"messages": [{"role": "user", "content": QUESTION}]}


class Report(BaseModel):
    """A report."""

    warm: bool


def agent(url, key, asked, extra=None, **options):
    @tool
    def get_weather(city: str) -> dict:
        """The weather of a city."""
        asked.append(city)
        return SKIES.get(city, {"sky": "windy", "degrees": 8})

    model = ChatOpenAI(
        model="tiny-tools", base_url=f"{url}/v1", api_key=key, temperature=0, extra_body=extra
    )
    return create_agent(model, [get_weather], **options)


def test_a_loop(tools_url, key):
    asked = []
    result = agent(tools_url, key, asked).invoke(MESSAGES)
    assert (result["messages"][-1].content, asked) == (ANSWER, ASKED)


def test_a_loop_that_is_streamed(tools_url, key):
    asked = []
    made = agent(tools_url, key, asked)
    text = [chunk.text for chunk, _ in made.stream(MESSAGES, stream_mode="messages")]
    assert "".join(text).endswith(ANSWER)
    assert asked == ASKED


def test_structured_output_beside_tools(tools_url, key):
    asked = []
    form = ProviderStrategy(Report)
    with pytest.raises(GraphRecursionError):
        agent(tools_url, key, asked, response_format=form).invoke(MESSAGES, {"recursion_limit": 2})
    assert asked == ASKED[:1]
    made = agent(tools_url, key, asked, NO_CALL, response_format=form)
    assert isinstance(made.invoke(MESSAGES)["structured_response"], Report)
    assert asked == ASKED[:1]
