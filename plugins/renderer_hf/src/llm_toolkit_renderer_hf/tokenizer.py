"""Loads a checkpoint's tokenizer and its special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from llm_toolkit.errors import CheckpointError
from tokenizers import Tokenizer, processors

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LoadedTokenizer(NamedTuple):
    """A tokenizer, its named special tokens ("bos_token": "<s>"), and tokenizer_config.json."""

    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    config: dict[str, Any]


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> LoadedTokenizer:
    """The tokenizer in `folder`. Without tokenizer.json, transformers converts what is there.

    Raises CheckpointError for a missing or broken file.
    """
    config = read_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(read_json(folder / "special_tokens_map.json") | config)
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for any broken file
            raise CheckpointError(f"{path} is no tokenizer that the package tokenizers can read: {error}") from error
        _apply_bos_eos(tokenizer, special_tokens, config)
    else:
        tokenizer, special_tokens = _convert(folder, trust_remote_code)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedTokenizer(tokenizer, special_tokens, config)


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file, {} where there is no such file. Raises CheckpointError for a broken one."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a mapping, not a {type(data).__name__}.")
    return data


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found


def _apply_bos_eos(tokenizer: Tokenizer, special_tokens: dict[str, str], config: dict[str, Any]) -> None:
    # As in transformers, add_bos_token and add_eos_token of tokenizer_config.json win over tokenizer.json's post-processor.
    if "add_bos_token" not in config and "add_eos_token" not in config:
        return
    added = [(special_tokens.get(name) if config.get(f"add_{name}") else None) for name in ("bos_token", "eos_token")]
    known = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(added) if token is not None]
    if any(token_id is None for _, token_id in known):
        return
    single = " ".join(piece for piece in (added[0], "$A", added[1]) if piece is not None)
    tokenizer.post_processor = processors.TemplateProcessing(single=single.split(" "), special_tokens=known)


def _convert(folder: Path, trust_remote_code: bool) -> tuple[Tokenizer, dict[str, str]]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json. To convert another tokenizer file, install transformers: "
            "pip install 'llm-toolkit-renderer-hf[transformers]'."
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever the file's own reader raises
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers finds no tokenizer there that it can read: {error}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise CheckpointError(f"{folder}: {type(converted).__name__} has no form that the package tokenizers can run.")
    return backend, dict(converted.special_tokens_map)
