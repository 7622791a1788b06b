"""CtcRenderer: the text of labels of frames, as transformers' tokenizers for CTC write it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.renderer import DecodeStream
from toolkit_lm_renderer_hf.renderer import HfRenderer
from toolkit_lm_renderer_hf.tokenizer import LoadedTokenizer, load_tokenizer, read_json

from toolkit_lm_transformers.recordings import blank_of

_VOCABULARY = "vocab.json"
_CLASS = "Wav2Vec2CTCTokenizer"
_SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""Special tokens of that class, where tokenizer_config.json names no others."""


class CtcRenderer(HfRenderer):
    """HfRenderer for models that label frames: the blank ends a text. Without tokenizer.json, it
    reads the vocab.json of Wav2Vec2CTCTokenizer."""

    def __init__(self, config: VllmConfig) -> None:
        self._is_stripped = self._is_lower = False
        super().__init__(config)
        # A text has any other token; transformers leaves out the blank alone.
        self._eos_token_ids = [blank_of(config)]

    def _load_tokenizer(self, folder: Path, trust_remote_code: bool) -> LoadedTokenizer:
        if (folder / "tokenizer.json").is_file() or not (folder / _VOCABULARY).is_file():
            return load_tokenizer(folder, trust_remote_code)
        stated = read_json(folder / "tokenizer_config.json")
        kind = stated.get("tokenizer_class", _CLASS)
        if kind != _CLASS:
            raise CheckpointError(
                f"{folder}: {kind!r:.100} cannot be read without tokenizer.json: {_CLASS} can."
            )
        self._is_stripped = True
        self._is_lower = bool(stated.get("do_lower_case"))
        tokenizer = Tokenizer(models.WordLevel(_vocabulary(folder, stated)))
        delimiter = _text(stated.get("word_delimiter_token")) or "|"
        between = stated.get("replace_word_delimiter_char", " ")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(delimiter, str(between)), decoders.Fuse()]
        )
        special = {name: _text(stated.get(name)) or text for name, text in _SPECIAL.items()}
        tokenizer.add_special_tokens(
            [text for text in special.values() if tokenizer.token_to_id(text) is not None]
        )
        if tokenizer.token_to_id(special["pad_token"]) != blank_of(self.config):
            raise CheckpointError(
                f"{folder}: the tokenizer's blank is {special['pad_token']!r}, and config.json's "
                f"pad_token_id is {blank_of(self.config)}."
            )
        # The blank ends its texts.
        del special["eos_token"]
        return LoadedTokenizer(tokenizer, special, stated)

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        # The prompt is the blank, and no text.
        stream = super().decode_stream(skip_special_tokens=skip_special_tokens)
        return _Stripped(stream, self._is_lower) if self._is_stripped else stream

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        text = text.strip() if self._is_stripped else text
        return text.lower() if self._is_lower else text


class _Stripped(DecodeStream):
    """Text without white space at its ends: white space waits for what follows it."""

    def __init__(self, stream: DecodeStream, is_lower: bool) -> None:
        self._stream = stream
        self._is_lower = is_lower
        self._held = ""
        self._has_begun = False

    def push(self, token_ids: Sequence[int]) -> str:
        return self._add(self._stream.push(token_ids))

    def flush(self) -> str:
        return self._add(self._stream.flush())

    def _add(self, text: str) -> str:
        text = self._held + (text.lower() if self._is_lower else text)
        text = text if self._has_begun else text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._has_begun = self._has_begun or bool(kept)
        return kept


def _vocabulary(folder: Path, stated: dict[str, Any]) -> dict[str, int]:
    """Ids by label; of a vocabulary of several languages: those of `target_lang`. Raises
    CheckpointError."""
    found = read_json(folder / _VOCABULARY)
    language = stated.get("target_lang")
    if language is not None and isinstance(part := found.get(language), dict):
        found = part
    if not found or not all(type(number) is int and number >= 0 for number in found.values()):
        languages = ", ".join(name for name, part in found.items() if isinstance(part, dict))
        raise CheckpointError(
            f"{folder}: {_VOCABULARY} must name a number for each label. The target_lang of "
            f"tokenizer_config.json is {language!r:.100}, of {languages or 'no languages':.200}."
        )
    return found


def _text(token: Any) -> str | None:
    """Text of a token, in either form of tokenizer_config.json."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
