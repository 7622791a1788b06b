"""langchain-openai: chats, streams, structured output in each of its ways, tools, responses,
embeddings, async."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

ASK = "What is the capital of France?"
PARIS = "The capital of France is Paris."


class Light(BaseModel, extra="forbid"):
    """Switches a light."""

    colour: Literal["red", "green"] = Field(description="Of the light.")
    on: bool


@pytest.fixture
def chat(url, key):
    return ChatOpenAI(model="tiny", base_url=f"{url}/v1", api_key=key, temperature=0, max_retries=0)


def test_chat(chat):
    assert chat.invoke(ASK).content == PARIS
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == PARIS
    assert [message.content for message in chat.batch([ASK, ASK])] == [PARIS, PARIS]
    assert asyncio.run(chat.ainvoke(ASK)).content == PARIS


def test_completions(url, key):
    model = OpenAI(model="tiny", base_url=f"{url}/v1", api_key=key, temperature=0, max_tokens=4)
    assert model.invoke("Once upon a time")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    assert isinstance(chat.with_structured_output(Light, method=method).invoke(ASK), Light)


def test_tools(chat):
    message = chat.bind_tools([Light], tool_choice="required", parallel_tool_calls=False).invoke(
        ASK
    )
    assert message.tool_calls[0]["name"] == "Light" and Light(**message.tool_calls[0]["args"])


def test_responses(url, key):
    chat = ChatOpenAI(
        model="tiny", base_url=f"{url}/v1", api_key=key, temperature=0, use_responses_api=True
    )
    assert chat.invoke(ASK).text == PARIS
    assert "".join(chunk.text for chunk in chat.stream(ASK)) == PARIS


def test_embeddings(embed_url, key):
    # Otherwise it sends tokens of OpenAI's vocabulary.
    model = OpenAIEmbeddings(
        model="tiny", base_url=f"{embed_url}/v1", api_key=key, check_embedding_ctx_length=False
    )
    assert len(model.embed_documents(["one", "two"])) == 2
    assert model.embed_query("one") == pytest.approx(model.embed_documents(["one"])[0])
