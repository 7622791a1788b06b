"""Looks up token ids in a tokenizer's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit_lm.errors import CheckpointError

from toolkit_lm_sentence_transformers.json_file import read_json_file

_USUAL_MASKS = ("[MASK]", "<mask>")
"""Mask tokens that the tokenizer classes of transformers have where no file names one."""


class Vocabulary:
    """Tokens of tokenizer.json, and the names of special tokens from the files next to it. Raises
    CheckpointError."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"
        content = read_json_file(self.path, most=None)
        try:
            vocab = content["model"]["vocab"]
            # Unigram models list each piece with its score; its place is its id.
            self._ids: dict[str, int] = (
                dict(vocab)
                if isinstance(vocab, dict)
                else {piece: i for i, (piece, _) in enumerate(vocab)}
            )
            self._ids.update(
                (token["content"], token["id"]) for token in content.get("added_tokens") or []
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{str(self.path)!r} has no vocabulary that can be read: {type(error).__name__}: "
                f"{error}"
            ) from error
        self._named: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                values = read_json_file(folder / name)
                self._named |= values if isinstance(values, dict) else {}

    def id_of(self, token: str) -> int | None:
        """Id of a token; None if the vocabulary does not have exactly this token."""
        return self._ids.get(token)

    @property
    def mask_id(self) -> int | None:
        """Id of the mask token; without one, of the end-of-sequence token. None without both."""
        for token in (self._special("mask_token"), *_USUAL_MASKS, self._special("eos_token")):
            if token is not None and token in self._ids:
                return self._ids[token]
        return None

    def special_id(self, name: str) -> int | None:
        """Id of the special token of that name ("cls_token", ...); None where no file names it."""
        token = self._special(name)
        return None if token is None else self._ids.get(token)

    def _special(self, name: str) -> str | None:
        token = self._named.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        return token if isinstance(token, str) else None
