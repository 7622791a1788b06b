"""Bodies and answers of /v1/conversations."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from toolkit_lm_server.client_metadata import Metadata
from toolkit_lm_server.protocol import PlainBody, examples
from toolkit_lm_server.schema_texts import Described

Items = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=20)]


class ConversationRef(Described):
    """A conversation that a response reads and continues."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: str
    """The conversation's id."""


class ConversationBody(PlainBody):
    """The body of POST /v1/conversations."""

    model_config = examples(
        {}, {"items": [{"role": "user", "content": "hi"}], "metadata": {"topic": "greeting"}}
    )
    verdicts = {}

    items: Annotated[list[dict[str, Any]], Field(max_length=20)] | None = None
    """Items that the conversation begins with: those of a response's input."""
    metadata: Metadata | None = None
    """Values that come back with the conversation."""


class ItemsBody(PlainBody):
    """The body of POST /v1/conversations/{conversation_id}/items."""

    model_config = examples({"items": [{"role": "user", "content": "hi"}]})
    verdicts = {}

    items: Items
    """Items to add: those of a response's input."""


class ConversationObject(Described):
    id: str
    """The conversation's id."""
    object: Literal["conversation"]
    """The kind of object."""
    created_at: int
    """Time at which it was made, in seconds since 1970."""
    metadata: dict[str, str]
    """The client's values."""


class DeletedConversation(Described):
    id: str
    """The conversation's id."""
    object: Literal["conversation.deleted"]
    """The kind of object."""
    deleted: Literal[True]
    """The conversation is gone."""
