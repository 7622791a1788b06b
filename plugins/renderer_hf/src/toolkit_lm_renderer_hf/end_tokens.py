"""Tokens that end a text, as the files of a checkpoint state them."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError

logger = logging.getLogger(__name__)


def text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    # Models for retrieval hold the config of a language model that sees.
    inner = hf_config.get("vlm_config")
    hf_config = inner if isinstance(inner, dict) else hf_config
    nested = hf_config.get("text_config")
    return {**hf_config, **nested} if isinstance(nested, dict) else hf_config


def end_tokens(config: VllmConfig, of_tokenizer: int | None, vocab_size: int) -> list[int]:
    """End-of-sequence token ids from generation_config.json, config.json and the tokenizer. Ids
    outside the vocabulary are left out: the model has no logit for them.

    Raises CheckpointError if an entry is not a token id."""
    found: dict[int, None] = {}
    for file, token_id in _stated(config):
        if not 0 <= token_id < vocab_size:
            logger.warning(
                "%s: eos_token_id %d is not in the vocabulary of %d tokens, and never ends a text.",
                file,
                token_id,
                vocab_size,
            )
        else:
            found[token_id] = None
    if of_tokenizer is not None and of_tokenizer < vocab_size:
        if found and of_tokenizer not in found:
            logger.warning(
                "the tokenizer's eos_token %d is none of eos_token_id %s: all of them end a text.",
                of_tokenizer,
                list(found),
            )
        found[of_tokenizer] = None
    return list(found)


def _stated(config: VllmConfig) -> Iterator[tuple[Path, int]]:
    assert config.checkpoint is not None
    for name, values in (
        ("generation_config.json", config.checkpoint.generation_config),
        ("config.json", text_config(config.hf_config)),
    ):
        file = Path(config.checkpoint.path, name)
        value = values.get("eos_token_id")
        if value is None:
            continue
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is not int:
                raise CheckpointError(
                    f"{file}: eos_token_id must be a token id or a list of them, not "
                    f"{reprlib.repr(token_id)}."
                )
            yield file, token_id
