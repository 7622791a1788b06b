"""Loads a checkpoint's tokenizer and its special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from toolkit_lm.errors import CheckpointError

from toolkit_lm_renderer_hf.panic import panics_as
from toolkit_lm_renderer_hf.tokenizer_class import apply_class_options

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MOST_BYTES = 2**24
"""Most bytes of a JSON file other than the tokenizer itself."""


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
    older = read_json(folder / "special_tokens_map.json")
    # transformers does the same: a config that lists its added tokens wins over the older file.
    special_tokens = _special_tokens(
        older | config if "added_tokens_decoder" in config else config | older
    )
    path = folder / "tokenizer.json"
    with panics_as(
        lambda message: CheckpointError(
            f"the package tokenizers panics on the tokenizer in {folder}: {message}"
        )
    ):
        tokenizer, special_tokens = _load(path, config, special_tokens, trust_remote_code)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LoadedTokenizer(tokenizer, special_tokens, config)


def _load(
    path: Path, config: dict[str, Any], special_tokens: dict[str, str], trust_remote_code: bool
) -> tuple[Tokenizer, dict[str, str]]:
    folder = path.parent
    if path.is_file():
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for any broken file
            raise CheckpointError(
                f"{path} is not a tokenizer that the package tokenizers can read: {error}"
            ) from error
        # transformers 5 does the same: add_bos_token and add_eos_token of the config are ignored if
        # there is a tokenizer.json.
        apply_class_options(tokenizer, config, special_tokens, read_json(folder / "config.json"))
        _add_named_tokens(tokenizer, config, special_tokens)
        return tokenizer, special_tokens
    return _convert(folder, trust_remote_code)


def _add_named_tokens(
    tokenizer: Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]
) -> None:
    """Tokens that only the config knows come after the vocabulary, as transformers adds them.
    Raises CheckpointError for a broken one."""
    listed = config.get("added_tokens_decoder") or {}
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    try:
        ordered = [listed[key] for key in sorted(listed, key=int)]
        more = [*special_tokens.values(), *(extra.values() if isinstance(extra, dict) else extra)]
        tokens = [*map(_added_token, ordered), *map(_added_token, more)]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise CheckpointError(
            f"tokenizer_config.json has a token that cannot be read: {error}"
        ) from error
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokenizer.add_tokens([token for token in tokens if token.content not in known])


def _added_token(token: Any) -> AddedToken:
    """An AddedToken from a text, or from a mapping in transformers' saved form."""
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    return AddedToken(
        token["content"], **{name: bool(token[name]) for name in flags if name in token}
    )


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file; {} if the file does not exist. Raises CheckpointError for a
    broken file."""
    if not path.is_file():
        return {}
    if path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(f"{path} is too large: it may have {_MOST_BYTES} bytes.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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


def _convert(folder: Path, trust_remote_code: bool) -> tuple[Tokenizer, dict[str, str]]:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json. To convert another tokenizer file, install "
            "transformers: "
            "pip install 'toolkit-lm-renderer-hf[transformers]'."
        ) from error
    try:
        converted = AutoTokenizer.from_pretrained(  # nosec B615 # a folder, and nothing is fetched
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever the file's own reader raises
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and transformers finds no tokenizer there that it "
            f"can read: {error}"
        ) from error
    backend = getattr(converted, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise CheckpointError(
            f"{folder}: {type(converted).__name__} cannot be converted to a form that the "
            "package tokenizers can run."
        )
    return backend, dict(converted.special_tokens_map)
