"""dspy: `Predict` with structured output by the JSON adapter, and with native calls."""

from __future__ import annotations

from typing import Literal

import dspy
import pytest
from weather import QUESTION, SKIES


class Served(dspy.LM):
    """A model that no catalog of dspy's has, with what the server can do."""

    supports_response_schema = supports_function_calling = True
    supported_params = frozenset(
        {"response_format", "temperature", "max_tokens", "tools", "tool_choice"}
    )


@pytest.fixture
def model(long_url, key):
    return Served(
        "openai/tiny-tools",
        api_base=f"{long_url}/v1",
        api_key=key,
        temperature=0,
        max_tokens=256,
        cache=False,
        num_retries=0,
    )


class Warm(dspy.Signature):
    """Say whether it is warm."""

    question: str = dspy.InputField()
    warm: bool = dspy.OutputField()


def test_structured_output(model):
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Warm)(question=QUESTION).warm in (True, False)
    sent = model.history[-1]["kwargs"]["response_format"]
    assert sent is not None


class Ask(dspy.Signature):
    """Ask for what the question takes."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def test_calls(model):
    def get_weather(city: Literal["Paris", "Tokyo"]) -> dict:
        """The weather of a city."""
        return SKIES[city]

    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    asked = model.copy(tool_choice="required")
    with dspy.context(lm=asked, adapter=adapter):
        made = dspy.Predict(Ask)(question=QUESTION, tools=[dspy.Tool(get_weather)])
    [call, *_] = made.calls.tool_calls
    assert call.name == "get_weather" and call.args["city"] in SKIES
