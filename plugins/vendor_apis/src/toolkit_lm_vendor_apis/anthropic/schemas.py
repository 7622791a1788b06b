"""Response schemas for the API's description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict
from toolkit_lm_server.schema_texts import Described


class ContentBlock(Described):
    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


class CacheCreation(Described):
    ephemeral_5m_input_tokens: int
    """Those of cache_creation_input_tokens that are to stay for 5 minutes."""
    ephemeral_1h_input_tokens: int
    """Those of cache_creation_input_tokens that are to stay for an hour."""


class MessageUsage(Described):
    input_tokens: int
    """Tokens of the prompt that were neither found in the cache nor put there by cache_control."""
    cache_creation_input_tokens: int
    """Tokens of the prompt that a request with cache_control has put into the cache: those of whole
    blocks. 0 without cache_control."""
    cache_read_input_tokens: int
    """Tokens of the prompt that were found in the cache."""
    cache_creation: CacheCreation
    """cache_creation_input_tokens by time."""
    output_tokens: int
    """Tokens of the output."""


class AnthropicMessage(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, where the request asks for them."""
    token_ids: list[int] | None = None
    """Token ids of the output, where the request asks for them."""


class MessageEvent(Described):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str


class TokenCount(Described):
    input_tokens: int
