"""Reads artifact.metadata, the settings that the ColBERT authors' library saves with a
checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import Struct

from toolkit_lm_sentence_transformers.json_file import JsonObject, choose
from toolkit_lm_sentence_transformers.module_config import positive


class ArtifactMetadata(Struct, frozen=True, kw_only=True):
    """The settings that decide over vectors and scores, with the library's defaults."""

    dim: int = 128
    """Size of a token's vector."""
    query_marker: str = "[unused0]"
    document_marker: str = "[unused1]"
    query_length: int = 32
    """Tokens of each query, which is cut or filled up to it."""
    document_length: int = 220
    """Tokens of the longest document."""
    attend: bool = False
    """The model's attention sees the tokens that queries are filled up with."""
    mask_punctuation: bool = True
    """Punctuation of documents is not compared."""


def read_artifact_metadata(folder: Path) -> ArtifactMetadata:
    """Defaults stand for what is missing, the file itself too. Raises CheckpointError."""
    path = folder / "artifact.metadata"
    fields = JsonObject.read(path) if path.is_file() else JsonObject(repr(str(path)), {})
    # Its other keys are about training and indexing.
    choose(fields.source, "similarity", fields.get("similarity", str) or "cosine", ["cosine"])
    choose(fields.source, "interaction", fields.get("interaction", str) or "colbert", ["colbert"])
    values = {
        "dim": positive(fields, "dim"),
        "query_marker": fields.get("query_token_id", str),
        "document_marker": fields.get("doc_token_id", str),
        "query_length": positive(fields, "query_maxlen"),
        "document_length": positive(fields, "doc_maxlen"),
        "attend": fields.get("attend_to_mask_tokens", bool),
        "mask_punctuation": fields.get("mask_punctuation", bool),
    }
    said_of: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    return ArtifactMetadata(**said_of)
