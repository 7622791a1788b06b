"""Answers of render servers become rendered prompts. Nothing in them is believed that can be
checked, and counts come before objects."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Raw, Struct
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.renderer import Rendered

from toolkit_lm_renderer_remote.wire import MSGPACK, ErrorAnswer, ErrorDetail

_MOST_ARRAYS = 16
_MOST_AXES = 8
_MOST_FACTS = 64
_MOST_NUMBERS = 4096
_MOST_INSIDE = _MOST_ARRAYS * (_MOST_AXES + 3) + _MOST_NUMBERS + 16
"""Commas within a feature's JSON, apart from those of its mask."""
_IDENTIFIER = 512
"""Characters of an identifier."""
_DTYPES = frozenset(
    ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
)

_ABSENT = Raw()
_NULLS = (b"", b"null", b"\xc0")

Kind = TypeVar("Kind")


class WrongAnswerError(Exception):
    """Why an answer cannot be used: a clause that goes on after the server's name."""


class _Prompt(Struct):
    token_ids: Raw
    features: Raw = _ABSENT


class _Prompts(Struct):
    data: list[_Prompt]


class _Tokens(Struct):
    tokens: Raw


class _Position(Struct):
    offset: int
    length: int
    mask: Raw = _ABSENT


class _Array(Struct):
    dtype: str
    shape: Raw
    data: memoryview


class _Feature(Struct, kw_only=True):
    modality: str
    mm_identifier: str
    mm_position: _Position
    data: Raw = _ABSENT
    layout: Raw = _ABSENT


class Answer:
    """The body of an answer, in one of the two forms."""

    def __init__(self, body: bytes, content_type: str) -> None:
        self._body = body
        kind = content_type.partition(";")[0].strip().lower()
        if kind not in ("application/json", *MSGPACK):
            raise WrongAnswerError("its answer is neither JSON nor msgpack")
        self._is_msgpack = kind in MSGPACK

    def prompt(
        self, num_media: int = 0, held: Collection[str] = (), fewest: int | None = None
    ) -> Rendered:
        """A rendered prompt. `num_media`: items of media in what was sent, of which some may be
        none, but not the `fewest`.

        `held`: identifiers whose data may be left out. Raises WrongAnswerError.
        """
        return self._rendered(self._as(_Prompt, self._body), num_media, held, fewest)

    def only_prompt(
        self, num_media: int = 0, held: Collection[str] = (), fewest: int | None = None
    ) -> Rendered:
        """Reads an answer that lists exactly one prompt; otherwise like `prompt`."""
        found = self._as(_Prompts, self._body).data
        if len(found) != 1:
            raise WrongAnswerError(f"it gave {len(found)} prompts for one")
        return self._rendered(found[0], num_media, held, fewest)

    def tokens(self) -> Rendered:
        """Tokens of a text. Raises WrongAnswerError."""
        return Rendered(self._token_ids(self._as(_Tokens, self._body).tokens))

    def error(self) -> ErrorDetail:
        """The request's error in an answer. Raises WrongAnswerError."""
        return self._as(ErrorAnswer, self._body).error

    def _rendered(
        self, found: _Prompt, num_media: int, held: Collection[str], fewest: int | None
    ) -> Rendered:
        token_ids = self._token_ids(found.token_ids)
        features = (
            []
            if _is_null(found.features)
            else self._features(found.features, len(token_ids), num_media)
        )
        if len(features) < (num_media if fewest is None else fewest):
            raise WrongAnswerError(
                f"it gave {len(features)} features for {num_media} items of media"
            )
        end = 0
        for feature in features:
            if feature.mm_position.offset < end:
                raise WrongAnswerError("features overlap, or are not in order")
            end = feature.mm_position.end
            if end > len(token_ids):
                raise WrongAnswerError("a feature ends beyond the prompt")
            if feature.data is None and feature.mm_identifier not in held:
                raise WrongAnswerError("a feature has no data, and nobody holds it")
        return Rendered(token_ids, features or None)

    def _token_ids(self, raw: Raw) -> list[int]:
        token_ids = self._as(list[int], raw)
        if not token_ids:
            raise WrongAnswerError("it gave no token")
        return token_ids

    def _features(self, raw: Raw, num_tokens: int, num_media: int) -> list[MultiModalFeatureSpec]:
        # In JSON, with all that the features of so many items may have inside.
        self._check_count(
            raw, num_media, "the features", num_commas=2 * num_tokens + _MOST_INSIDE * num_media
        )
        items = self._as(list[Raw], raw)
        if len(items) > num_media:
            raise WrongAnswerError(f"it gave {len(items)} features for {num_media} items of media")
        return [self._feature(item, num_tokens) for item in items]

    def _feature(self, raw: Raw, num_tokens: int) -> MultiModalFeatureSpec:
        found = self._as(_Feature, raw)
        position = found.mm_position
        if (
            not 0 < len(found.mm_identifier) <= _IDENTIFIER
            or not 0 < len(found.modality) <= _IDENTIFIER
        ):
            raise WrongAnswerError("a feature's identifier or modality is empty or too long")
        if not (0 <= position.offset < num_tokens and 0 < position.length <= num_tokens):
            raise WrongAnswerError("a feature stands outside of the prompt")
        mask = None
        if not _is_null(position.mask):
            self._check_count(position.mask, num_tokens, "a mask")
            mask = self._as(list[bool], position.mask)
            if len(mask) != position.length:
                raise WrongAnswerError("a feature's mask is not as long as the feature")
        return MultiModalFeatureSpec(
            modality=found.modality,
            mm_identifier=found.mm_identifier,
            mm_position=PlaceholderRange(position.offset, position.length, mask),
            data=None if _is_null(found.data) else self._data(found.data),
            layout={} if _is_null(found.layout) else self._layout(found.layout),
        )

    def _data(self, raw: Raw) -> dict[str, Array]:
        self._check_count(
            raw, _MOST_ARRAYS, "a feature's data", num_commas=_MOST_ARRAYS * (_MOST_AXES + 3)
        )
        return {
            name: self._array(array) for name, array in self._as(dict[str, _Array], raw).items()
        }

    def _array(self, array: _Array) -> Array:
        self._check_count(array.shape, _MOST_AXES, "a shape")
        shape = self._as(list[int], array.shape)
        if array.dtype not in _DTYPES:
            raise WrongAnswerError(f"an array has the dtype {array.dtype[:20]!r}")
        if (
            min(shape, default=0) < 0
            or math.prod(shape) * np.dtype(array.dtype).itemsize != array.data.nbytes
        ):
            raise WrongAnswerError("an array has not as many bytes as its shape and dtype say")
        return Array(array.dtype, shape, array.data)

    def _layout(self, raw: Raw) -> dict[str, list[float]]:
        if len(raw) > _MOST_NUMBERS * 9:
            raise WrongAnswerError("a feature's layout is too large")
        self._check_count(raw, _MOST_FACTS, "a feature's layout", num_commas=_MOST_NUMBERS)
        return self._as(dict[str, list[float]], raw)

    def _check_count(
        self, raw: Raw, most: int, subject: str, num_commas: int | None = None
    ) -> None:
        """Checks the length of a list or mapping before its items are made. `num_commas`: limit for
        JSON whose items contain commas."""
        if self._is_msgpack:
            too_many = _count(bytes(memoryview(raw)[:5])) > most
        else:
            too_many = bytes(raw).count(b",") > (
                max(most - 1, 0) if num_commas is None else num_commas
            )
        if too_many:
            raise WrongAnswerError(f"too much is in {subject}: {most} at most")

    def _as(self, kind: type[Kind], body: Any) -> Kind:
        try:
            return (
                msgspec.msgpack.decode(body, type=kind)
                if self._is_msgpack
                else msgspec.json.decode(body, type=kind)
            )
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WrongAnswerError(
                f"its answer is not a rendered prompt: {str(error)[:200]}"
            ) from None


def _count(head: bytes) -> int:
    """Length of msgpack's list or mapping, from its first bytes; 0 for anything else."""
    kind = head[0] if head else 0
    if 0x80 <= kind <= 0x9F:
        return kind & 0x0F
    width = {0xDC: 2, 0xDE: 2, 0xDD: 4, 0xDF: 4}.get(kind, 0)
    return int.from_bytes(head[1 : 1 + width], "big")


def _is_null(raw: Raw) -> bool:
    return bytes(memoryview(raw)[:5]) in _NULLS
