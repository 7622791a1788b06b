"""Token ids become text, one by one and without losing a byte."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from toolkit_lm.renderer import DecodeStream


class Detokenizer:
    """The bytes of each token. A token of tekken has the same ones wherever it stands."""

    def __init__(self, tekken: Any) -> None:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        self._tekken = tekken
        self._keep = SpecialTokenPolicy.KEEP
        self._num_special: int = tekken.num_special_tokens
        self._size: int = tekken.n_words
        self._pieces: dict[int, bytes] = {}

    def bytes_of(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bytes:
        """Bytes of these tokens together. Ids without a token are skipped."""
        start = self._num_special if skip_special_tokens else 0
        return b"".join(
            self._piece(token_id) for token_id in token_ids if start <= token_id < self._size
        )

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of these tokens together."""
        return self.bytes_of(token_ids, skip_special_tokens).decode("utf-8", "replace")

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = bytes(
                self._tekken.id_to_byte_piece(token_id, self._keep)
            )
        return piece


class TextStream(DecodeStream):
    """The text of one sequence as its tokens come."""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool) -> None:
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(self._detokenizer.bytes_of(token_ids, self._skip_special_tokens))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)
