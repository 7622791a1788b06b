"""The vocabulary of harmony, o200k_base: from its own file, or from the tokenizer.json of a gpt-oss
checkpoint."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from toolkit_lm.errors import CheckpointError

FILE = "o200k_base.tiktoken"
_TOKENIZER = "tokenizer.json"
_FOLDER = "TIKTOKEN_ENCODINGS_BASE"
"""The environment variable in which openai-harmony finds the folder of the file. Without it, it
would fetch the file."""
_SIZE = 199_998
"""Tokens without special ones."""
_lock = threading.Lock()


def missing() -> str | None:
    """Why openai-harmony cannot be used; None where it is installed. Imports nothing."""
    if importlib.util.find_spec("openai_harmony") is None:
        return "openai-harmony is not installed: pip install 'toolkit-lm-renderer-harmony[harmony]'"
    return None


def load_encoding(folder: Path) -> Any:
    """The HarmonyEncoding of a checkpoint. Raises CheckpointError where neither file is there, or
    it is another vocabulary."""
    if (folder / FILE).is_file():
        return _load(folder, folder / FILE)
    if not (folder / _TOKENIZER).is_file():
        raise CheckpointError(f"{str(folder)!r} has neither {FILE} nor {_TOKENIZER}.")
    with tempfile.TemporaryDirectory(prefix="toolkit_lm-") as made:
        (Path(made) / FILE).write_bytes(_rebuilt(folder / _TOKENIZER))
        return _load(Path(made), folder / _TOKENIZER)


def _load(folder: Path, source: Path) -> Any:
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    with _lock:
        before = os.environ.get(_FOLDER)
        os.environ[_FOLDER] = str(folder)
        try:
            # It compares the file's hash with that of the vocabulary.
            return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        except HarmonyError as error:
            raise CheckpointError(
                f"{source} is not the vocabulary of gpt-oss: {str(error)[:300]}"
            ) from error
        finally:
            if before is None:
                del os.environ[_FOLDER]
            else:
                os.environ[_FOLDER] = before


def _rebuilt(path: Path) -> bytes:
    """The file that has the tokens of a byte-level tokenizer.json, in the order of their ids."""
    try:
        vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"]
        tokens = sorted((number, text) for text, number in vocabulary.items() if number < _SIZE)
        values = _bytes_of_characters()
        lines = [
            b"%b %d\n" % (base64.b64encode(bytes(values[character] for character in text)), number)
            for number, text in tokens
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not the tokenizer of gpt-oss: {type(error).__name__}: {error}"
        ) from error
    return b"".join(lines)


def _bytes_of_characters() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: GPT-2's table."""
    shown = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + index): byte for index, byte in enumerate(hidden)
    }
