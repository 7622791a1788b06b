"""Fields that a body does not state: those of other projects, which a table covers, and unknown
ones."""

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
"""The header of an answer that names the ignored fields."""

_MOST_NAMES = 8
"""Most ignored fields of one request that are reported."""
_MOST_TOLD = 256
_logged_names: set[str] = set()
"""Names that the log has reported already."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def unknown_field(
    name: str, known: Iterable[str], inside: str = "", hint: str = ""
) -> PydanticCustomError:
    """The error of an unknown field, with a hint at the nearest known one."""
    name = printable(name)
    hint = hint or nearest(name, known, 1, otherwise="")
    context = {"param": f"{inside}{name}", "hint": f". {hint}" if hint else ""}
    return PydanticCustomError(
        "unknown", "Unrecognized request argument supplied: {param}{hint}", context
    )


def is_plain(name: str) -> bool:
    """Whether a header may hold the name."""
    return _PLAIN.fullmatch(name) is not None


class UnknownFields(Struct):
    """The unknown fields of one request, which are ignored or refused."""

    lenient: bool
    names: dict[str, None] = field(default_factory=dict)
    """Names of the ignored fields."""

    def add(self, name: str, known: Iterable[str], inside: str = "") -> None:
        """Ignores an unknown field. Raises PydanticCustomError where fields are strict, and for a
        name that is not plain."""
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
        """Ignores a field that clients cannot leave out, even where fields are strict."""
        if len(self.names) < _MOST_NAMES:
            self.names[name] = None
        if self._is_news(name):
            logger.warning("the field %s of a request is ignored: %s", name, why)

    @staticmethod
    def _is_news(name: str) -> bool:
        """Whether the log has not reported the name yet."""
        if name in _logged_names or len(_logged_names) >= _MOST_TOLD:
            return False
        _logged_names.add(name)
        return True


STRICT = UnknownFields(lenient=False)
"""Unknown fields of a body that comes from elsewhere. All are refused."""


def kept_fields(
    fields: Mapping[str, Any],
    stated: Collection[str],
    verdicts: Verdicts,
    *,
    dropped: Collection[str] = (),
    inside: str = "",
) -> dict[str, Any]:
    """The fields of an object that are read, under our names. `stated`: names of the fields to
    read. `inside`: prefix of the object's place.

    `dropped`: stated fields that are left out where their value changes nothing. Raises
    PydanticCustomError for a field that would change the answer, and for an unknown one where
    fields are strict. Raises it for two names of one field with different values, too.
    """
    _check_names(fields, verdicts, inside)
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        verdict = verdicts.get(name)
        if name in stated:
            # Numbers speak for themselves: 0 may turn off what another field turns on.
            if verdict is None or name not in dropped or not verdict.is_neutral(value, fields):
                kept[name] = value
        elif verdict is None:
            _unknown(name, value, stated, inside)
        elif verdict.becomes == "renamed" and value is not None:
            kept[verdict.note] = value
        elif verdict.becomes == "refused" and not verdict.is_neutral(value, fields):
            raise unsupported(f"{inside}{name}", verdict.note)
        elif verdict.becomes == "reported" and not verdict.is_neutral(value, fields):
            (CALLER.get().unknown or STRICT).drop(f"{inside}{name}", verdict.note)
    return kept


def _check_names(fields: Mapping[str, Any], verdicts: Verdicts, inside: str) -> None:
    """Checks that a field with two names has one value. Otherwise one of the values would be
    ignored in silence."""
    firsts: dict[str, str] = {}
    for name, value in fields.items():
        ours = (
            verdict.note
            if (verdict := verdicts.get(name)) is not None and verdict.becomes == "renamed"
            else name
        )
        if (
            value is None
            or (first := firsts.setdefault(ours, name)) == name
            or same(value, fields[first])
        ):
            continue
        alias, other = (name, first) if name != ours else (first, name)
        context = {"param": f"{inside}{alias}", "other": f"{inside}{other}"}
        raise PydanticCustomError(
            "two_names",
            "{param} means the same as {other}, which has another value: give one of them.",
            context,
        )


def _unknown(name: str, value: Any, stated: Collection[str], inside: str) -> None:
    unknown = CALLER.get().unknown or STRICT
    if not inside and (hint := "" if asks_nothing(value) else parameter_source(name)):
        # Without its plugin, the answer would be another one than was asked for.
        raise unknown_field(name, (), hint=hint)
    # For an unknown field, false may change more than it seems.
    if value is False or not (asks_nothing(value) and unknown.lenient):
        unknown.add(name, stated, inside)


def unsupported(name: str, why: str) -> PydanticCustomError:
    """The error of another project's field that would change the answer."""
    return PydanticCustomError(
        "unsupported",
        "{param} is not supported by this server: {why}.",
        {"param": name, "why": why},
    )
