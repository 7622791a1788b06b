"""Fields that a body does not state: those of others, of which a table says what becomes of them,
and those that nobody knows."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from pydantic_core import PydanticCustomError
from toolkit_lm.errors import nearest
from toolkit_lm.plugin import parameter_source

from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import printable
from toolkit_lm_server.request_fields import Verdicts, asks_nothing, same

logger = logging.getLogger("uvicorn.error")

IGNORED = "x-ignored-fields"
"""The header of an answer that names the fields which were ignored."""

_MOST_NAMES = 8
"""Of one request that are told."""
_MOST_TOLD = 256
_told: set[str] = set()
"""Names that the log has."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def unknown_field(
    name: str, known: Iterable[str], inside: str = "", hint: str = ""
) -> PydanticCustomError:
    """The error of a field that there is not, with a hint at what may be meant."""
    name = printable(name)
    hint = hint or nearest(name, known, 1, otherwise="")
    told = {"param": f"{inside}{name}", "hint": f". {hint}" if hint else ""}
    return PydanticCustomError(
        "unknown", "Unrecognized request argument supplied: {param}{hint}", told
    )


def is_plain(name: str) -> bool:
    """A header may have it."""
    return _PLAIN.fullmatch(name) is not None


class UnknownFields(Struct):
    """What one request has of them: they are ignored, or refused."""

    lenient: bool
    names: dict[str, None] = field(default_factory=dict)
    """Those that were ignored."""

    def add(self, name: str, known: Iterable[str], inside: str = "") -> None:
        """Raises PydanticCustomError where fields are strict, and for what is no name."""
        whole = f"{inside}{name}"
        if not (self.lenient and is_plain(whole)):
            raise unknown_field(name, known, inside)
        if len(self.names) < _MOST_NAMES:
            self.names[whole] = None
        if self._is_news(whole):
            hint = nearest(name, known, 1, otherwise="")
            logger.warning(
                "the field %s of a request is ignored: this server does not know it. %s",
                whole,
                hint,
            )

    def drop(self, name: str, why: str) -> None:
        """Ignores a field that clients may not leave out, strict or not."""
        if len(self.names) < _MOST_NAMES:
            self.names[name] = None
        if self._is_news(name):
            logger.warning("the field %s of a request is ignored: %s", name, why)

    @staticmethod
    def _is_news(name: str) -> bool:
        """The log does not have it yet."""
        if name in _told or len(_told) >= _MOST_TOLD:
            return False
        _told.add(name)
        return True


STRICT = UnknownFields(lenient=False)
"""A body that comes from elsewhere is to have none."""


def kept_fields(
    given: Mapping[str, Any],
    stated: Collection[str],
    verdicts: Verdicts,
    *,
    dropped: Collection[str] = (),
    inside: str = "",
) -> dict[str, Any]:
    """Of an object's fields those that are read, under our names. `stated`: the names that are.
    `inside`: where the object stands.

    `dropped`: those of the stated ones that are left out where their value changes nothing.
    Raises PydanticCustomError for a field that would change the answer, for two names of one field
    with different values, and for an unknown one where fields are strict.
    """
    _check_names(given, verdicts, inside)
    kept: dict[str, Any] = {}
    for name, value in given.items():
        verdict = verdicts.get(name)
        if name in stated:
            # Numbers speak for themselves: 0 may turn off what another field turns on.
            if verdict is None or name not in dropped or not verdict.is_neutral(value, given):
                kept[name] = value
        elif verdict is None:
            _unknown(name, value, stated, inside)
        elif verdict.becomes == "renamed" and value is not None:
            kept[verdict.note] = value
        elif verdict.becomes == "refused" and not verdict.is_neutral(value, given):
            raise unsupported(f"{inside}{name}", verdict.note)
        elif verdict.becomes == "told" and not verdict.is_neutral(value, given):
            (CALLER.get().unknown or STRICT).drop(f"{inside}{name}", verdict.note)
    return kept


def _check_names(given: Mapping[str, Any], verdicts: Verdicts, inside: str) -> None:
    """Each field comes under one name, or has one value: whichever were taken, the other would be
    left out in silence."""
    firsts: dict[str, str] = {}
    for name, value in given.items():
        ours = (
            verdict.note
            if (verdict := verdicts.get(name)) is not None and verdict.becomes == "renamed"
            else name
        )
        if (
            value is None
            or (first := firsts.setdefault(ours, name)) == name
            or same(value, given[first])
        ):
            continue
        alias, other = (name, first) if name != ours else (first, name)
        told = {"param": f"{inside}{alias}", "other": f"{inside}{other}"}
        raise PydanticCustomError(
            "two_names",
            "{param} means the same as {other}, which has another value: give one of them.",
            told,
        )


def _unknown(name: str, value: Any, stated: Collection[str], inside: str) -> None:
    unknown = CALLER.get().unknown or STRICT
    if not inside and (hint := "" if asks_nothing(value) else parameter_source(name)):
        # Without its plugin, the answer would be another one than was asked for.
        raise unknown_field(name, (), hint=hint)
    # Of what nobody knows, false may change more than it seems.
    if value is False or not (asks_nothing(value) and unknown.lenient):
        unknown.add(name, stated, inside)


def unsupported(name: str, why: str) -> PydanticCustomError:
    """The error of a field that others have, and that would change the answer."""
    return PydanticCustomError(
        "unsupported",
        "{param} is not supported by this server: {why}.",
        {"param": name, "why": why},
    )
