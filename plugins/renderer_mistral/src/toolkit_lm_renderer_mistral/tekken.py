"""Tekken: the tokenizer file of Mistral's checkpoints, and whether mistral-common is there to read
it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from toolkit_lm.errors import CheckpointError

from toolkit_lm_renderer_mistral.refusal import is_panic, wording

FILE = "tekken.json"


def missing() -> str | None:
    """Why mistral-common cannot be used; None where it is installed. Imports nothing."""
    if importlib.util.find_spec("mistral_common") is None:
        return "mistral-common is not installed: pip install 'toolkit-lm-renderer-mistral[mistral]'"
    return None


def load_tekken(folder: Path) -> Any:
    """The MistralTokenizer of a checkpoint. Raises CheckpointError for a missing or broken file."""
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{str(folder)!r} has no {FILE}.")
    try:
        return MistralTokenizer.from_file(str(path))
    except BaseException as error:
        # It raises whatever comes: AssertionError, KeyError, a panic of the regular expression's
        # compiler.
        if isinstance(error, Exception) or is_panic(error):
            raise CheckpointError(
                f"{path} is not a tokenizer that mistral-common can read: {wording(error)}"
            ) from error
        raise
