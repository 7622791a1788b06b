"""Token ids become text, one by one and without losing a byte."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer
from toolkit_lm.errors import CheckpointError
from toolkit_lm.renderer import DecodeStream

from toolkit_lm_renderer_hf.panic import is_panic

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PER_TOKEN = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece"}


class Detokenizer:
    """The bytes of each token.

    With the decoders that language models use, what a token adds depends on one thing besides the
    token: whether it is the first (a leading space may be dropped). So text comes out in constant
    time per token, whatever stands before. Bytes are joined before they are read as UTF-8, with one
    U+FFFD for each ill-formed sequence.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        decoders = _decoder_types(json.loads(tokenizer.to_str())["decoder"])
        self._byte_level = "ByteLevel" in decoders
        unknown = decoders - ({"ByteLevel", "Fuse"} if self._byte_level else _PER_TOKEN)
        if unknown:
            raise CheckpointError(
                f"the tokenizer's decoder {sorted(unknown)[0]!r} is not supported. Supported: "
                f"ByteLevel, {', '.join(sorted(_PER_TOKEN))}."
            )
        self._tokenizer = tokenizer
        self._byte_fallback = "ByteFallback" in decoders
        self._special = frozenset(
            i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._first: dict[int, bytes] = {}
        self._later: dict[int, bytes] = {}

    def pieces(
        self, token_ids: Iterable[int], *, first: bool, skip_special_tokens: bool
    ) -> Iterator[bytes]:
        """The bytes of each token that has any. `first`: these tokens begin the text. Ids without a
        token are passed over."""
        for token_id in token_ids:
            if skip_special_tokens and token_id in self._special:
                continue
            cache = self._first if first else self._later
            piece = cache.get(token_id)
            if piece is None:
                token = self._tokenizer.id_to_token(token_id)
                if token is None:
                    continue
                piece = cache[token_id] = self._bytes(token, first)
            first = False
            yield piece

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of these tokens together."""
        return b"".join(
            self.pieces(token_ids, first=True, skip_special_tokens=skip_special_tokens)
        ).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """The text that a token adds where it is not the first."""
        return b"".join(self.pieces([token_id], first=False, skip_special_tokens=False)).decode(
            "utf-8", "replace"
        )

    def _bytes(self, token: str, first: bool) -> bytes:
        if self._byte_level:
            try:
                return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
            except KeyError:
                return token.encode()
        # A space is the one byte that a decoder may drop at the start, so it takes the way of other
        # tokens.
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)) and match[1] != "20":
            return bytes.fromhex(match[1])
        once = self._decode([token])
        return once.encode() if first else self._decode([token, token])[len(once) :].encode()

    def _decode(self, tokens: list[str]) -> str:
        decoder = self._tokenizer.decoder
        if decoder is None:
            return " ".join(tokens)
        try:
            return str(decoder.decode(tokens))
        except BaseException as error:
            if is_panic(error):
                # A decoder's regular expression may fail, for example: the tokens exist, and their
                # requests continue.
                return "".join(tokens)
            raise


class TextStream(DecodeStream):
    """The text of one sequence as its tokens come. It goes on from the prompt's text, where there
    is one."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        skip_special_tokens: bool,
        prompt_token_ids: Sequence[int] = (),
    ) -> None:
        before = detokenizer.pieces(
            reversed(prompt_token_ids), first=False, skip_special_tokens=skip_special_tokens
        )
        self._first = next(before, None) is None
        self._detokenizer = detokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = list(
            self._detokenizer.pieces(
                token_ids, first=self._first, skip_special_tokens=self._skip_special_tokens
            )
        )
        self._first = self._first and not pieces
        return self._utf8.decode(b"".join(pieces))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def _decoder_types(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {name for part in decoder["decoders"] for name in _decoder_types(part)}
    return {decoder["type"]}


def _byte_of_char() -> dict[str, int]:
    """The characters that stand for bytes in byte-level BPE (GPT-2): printable Latin-1 for itself,
    the rest from U+0100 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
