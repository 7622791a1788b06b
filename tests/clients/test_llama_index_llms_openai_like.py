"""llama-index-llms-openai-like: chats, completions, streams, structured output, tools."""

from __future__ import annotations

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."


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
