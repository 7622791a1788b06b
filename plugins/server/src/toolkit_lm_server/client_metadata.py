"""Values that clients leave with what the server keeps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from toolkit_lm_server.protocol import PlainBody, examples

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
"""Texts by name."""


class MetadataBody(PlainBody):
    """The body that changes an object's metadata."""

    model_config = examples({"metadata": {"topic": "greeting"}})
    verdicts = {}

    metadata: Metadata
    """Values that come back with the object, in place of those that it has."""
