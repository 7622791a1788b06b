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
    """config.json, with what it says of the language model in front."""
    nested = hf_config.get("text_config")
    return {**hf_config, **nested} if isinstance(nested, dict) else hf_config


def end_tokens(config: VllmConfig, of_tokenizer: int, vocab_size: int) -> list[int]:
    """End-of-sequence token ids from generation_config.json, config.json and the tokenizer. Ids
    outside the vocabulary are left out: the model has no logit for them.

    Raises CheckpointError if an entry is not a token id."""
    found = dict.fromkeys(_stated(config))
    if found and of_tokenizer not in found:
        logger.warning(
            "the tokenizer's eos_token %d is none of eos_token_id %s: all of them end a text.",
            of_tokenizer,
            list(found),
        )
    return [
        token_id for token_id in dict.fromkeys([*found, of_tokenizer]) if 0 <= token_id < vocab_size
    ]


def _stated(config: VllmConfig) -> Iterator[int]:
    assert config.checkpoint is not None
    for name, values in (
        ("generation_config.json", config.checkpoint.generation_config),
        ("config.json", text_config(config.hf_config)),
    ):
        value = values.get("eos_token_id")
        if value is None:
            continue
        for token_id in value if isinstance(value, list) else [value]:
            if type(token_id) is not int:
                file = Path(config.checkpoint.path, name)
                raise CheckpointError(
                    f"{file}: eos_token_id must be a token id or a list of them, not "
                    f"{reprlib.repr(token_id)}."
                )
            yield token_id
