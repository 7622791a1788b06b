"""Makes a pooling profile of the files of sentence-transformers and of the ColBERT authors'
library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit_lm.config import PoolingProfile
from toolkit_lm.errors import CheckpointError
from toolkit_lm_poolers.details import PoolingDetails

from toolkit_lm_sentence_transformers.checkpoint_files import (
    SentenceTransformersConfig,
    read_sentence_transformers,
)
from toolkit_lm_sentence_transformers.flag_embedding import read_lexical, read_multi_vector
from toolkit_lm_sentence_transformers.json_file import JsonObject
from toolkit_lm_sentence_transformers.late_interaction import read_roles

_UNBOUNDED = 2**63
"""Lengths from here on mean no limit: transformers then writes the integer 1e30."""


def read_pooling_profile(
    folder: Path, hf_config: dict[str, Any], tokenizer: Path
) -> PoolingProfile | None:
    """Pooling profile of a checkpoint folder, its config.json and its tokenizer's folder; None
    without such files.

    Raises CheckpointError that names the file, and the part of it that is not understood."""
    found = read_sentence_transformers(folder, hf_config)
    if found is None:
        return None
    longest = found.max_seq_length or _max_tokens_of_tokenizer(folder)
    refusal = _refusal(found)
    roles = {}
    if refusal is None:
        try:
            roles = read_roles(found, tokenizer)
        except CheckpointError as error:
            refusal = str(error)
    details = PoolingDetails(
        folder=found.folder,
        is_complete=found.has_modules,
        lower_case=found.transformer.do_lower_case,
        prompts=found.prompts,
        default_prompt_name=found.default_prompt_name,
        roles=roles,
        pooling=found.pooling,
        splade=found.splade,
        heads=found.heads,
        token_heads=found.token_heads,
        lexical=read_lexical(folder, tokenizer),
        multi_vector=read_multi_vector(folder),
        embedding_size=found.embedding_size,
        truncate_dim=found.truncate_dim,
        similarity=found.similarity,
        logit_score=found.logit_score,
        activation=found.activation,
        refusal=refusal,
    )
    return details.as_profile(None if longest is None or longest >= _UNBOUNDED else longest)


def _refusal(found: SentenceTransformersConfig) -> str | None:
    """Error for tokenizer arguments that would change the model's input; None if there are none.
    Arguments of chat templates are allowed."""
    unknown = [key for key in found.transformer.processing_options if key != "chat_template"]
    if not unknown:
        return None
    return (
        f"the Transformer module of {found.folder!r} has processing_kwargs for "
        f"{', '.join(map(repr, unknown))}, which is not supported."
    )


def _max_tokens_of_tokenizer(folder: Path) -> int | None:
    """sentence-transformers asks the tokenizer where its own files do not say."""
    file = folder / "tokenizer_config.json"
    length = JsonObject.read(file).pop("model_max_length") if file.is_file() else None
    return length if type(length) is int and length > 0 else None
