"""Encodes texts and pairs of texts for the model: truncated, and with special tokens.

The tokenizers package splits an encoding that is too long into overflowing parts. It then joins
each part of one text with each part of the other. Two texts of 10,000 tokens truncated to 64 make
25,000 encodings. This module learns the special tokens once and truncates plain lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer
from toolkit_lm.renderer import RenderedText

from toolkit_lm_renderer_hf.pieces import PIECE, Cutter

_SAMPLE = "a"


class Frame(NamedTuple):
    """The special tokens around a text, or around a pair of texts and between them."""

    before: list[int]
    between: list[int]
    after: list[int]
    num_of_second: int
    """Tokens of `between` that have the second text's type."""

    @property
    def num_special_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


class Joiner:
    """Tokenizes texts, and joins their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cutter = Cutter(tokenizer)
        self._frames: dict[bool, Frame] = {}

    def token_ids(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Token ids of each distinct text, without special tokens."""
        found: dict[str, list[int]] = {text: [] for text in texts}
        for batch in _batches(
            (text, piece) for text in found for piece in self._cutter.pieces(text)
        ):
            for (text, _), ids in zip(
                batch, self._tokenize([piece for _, piece in batch]), strict=True
            ):
                found[text] += ids
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, however long."""
        ids = self.token_ids([text])[text]
        return self.join(ids, None, None).token_ids if add_special_tokens else ids

    def cut(self, text: str, max_tokens: int) -> str:
        """Longest prefix of `text` with at most `max_tokens` tokens, not counting special tokens.
        It has at least the first character."""
        start = 0
        room = max_tokens
        for piece in self._cutter.pieces(text):
            # One at a time: an encoding is larger than its text.
            [encoding] = self._tokenizer.encode_batch([piece], add_special_tokens=False)
            if len(encoding) > room:
                return text[: start + _end(encoding, room)]
            start, room = start + len(piece), room - len(encoding)
        return text

    def at_once(self, text: str) -> int:
        """Bytes of a text, in UTF-8, that are tokenized at a time."""
        return max(len(piece.encode(errors="surrogatepass")) for piece in self._cutter.pieces(text))

    def join(
        self, first: list[int], second: list[int] | None, max_tokens: int | None
    ) -> RenderedText:
        """Joins one text or a pair with special tokens, truncated at the end to `max_tokens`. In a
        pair the longer text is cut first, like "longest_first" in transformers."""
        frame = self.frame(second is not None)
        room = (
            len(first) + len(second or ())
            if max_tokens is None
            else max_tokens - frame.num_special_tokens
        )
        if second is None:
            return RenderedText([*frame.before, *first[:room], *frame.after])
        if len(first) + len(second) > room:
            shorter = min(len(first), len(second), room // 2)
            first = first[: room - shorter if len(first) > len(second) else shorter]
            second = second[: room - len(first)]
        start = len(frame.before) + len(first) + len(frame.between) - frame.num_of_second
        return RenderedText([*frame.before, *first, *frame.between, *second, *frame.after], start)

    def frame(self, is_pair: bool) -> Frame:
        """Learned from a short text."""
        if is_pair not in self._frames:
            first = self._sample()
            second = self._sample()
            joined = self._tokenizer.post_process(
                first, second if is_pair else None, add_special_tokens=True
            )
            places = [
                i for i, is_special in enumerate(joined.special_tokens_mask) if not is_special
            ]
            begin = places[0]
            end = places[len(first) - 1] + 1
            begin2, end2 = (places[len(first)], places[-1] + 1) if is_pair else (end, end)
            typed = joined.type_ids.index(1) if 1 in joined.type_ids else begin2
            self._frames[is_pair] = Frame(
                joined.ids[:begin], joined.ids[end:begin2], joined.ids[end2:], begin2 - typed
            )
        return self._frames[is_pair]

    def _sample(self) -> Encoding:
        """An encoding of some text that has tokens: of letters, else of a token in the
        vocabulary."""
        for text in chain(
            [_SAMPLE], map(self._token_text, range(self._tokenizer.get_vocab_size()))
        ):
            [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
            if len(encoding):
                return encoding
        raise ValueError("the tokenizer makes no tokens of any text")

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id])

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]


def _batches(pieces: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Pieces, each with its text, of the length of one together: encodings are larger than token
    ids."""
    batch: list[tuple[str, str]] = []
    size = 0
    for text, piece in pieces:
        batch.append((text, piece))
        size += len(piece)
        if size >= PIECE:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def _end(encoding: Encoding, most: int) -> int:
    """Number of characters that the first `most` tokens cover. The text has more tokens than
    that."""
    if not most:
        return 0
    # Not of `offsets`, which is a list of all of them.
    last = encoding.token_to_chars(most - 1)
    following = encoding.token_to_chars(most)
    assert last is not None and following is not None, "both are among its tokens"
    # A character of several tokens is left out when not all of them fit, unless it is the first
    # one.
    return min(last[1], following[0]) or last[1]
