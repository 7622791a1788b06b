"""Fields that a body does not state: those of others, and those that nobody knows."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

from msgspec import Struct, field
from pydantic_core import PydanticCustomError
from toolkit_lm.errors import nearest

from toolkit_lm_server.errors import printable

logger = logging.getLogger("uvicorn.error")

IGNORED = "x-ignored-fields"
"""The header of an answer that names the fields which were ignored."""

NOTES = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id", "service_tier", "prediction"}
)
"""Fields that say something to accounting, or to whoever could be faster for it, and nothing to a model."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "extra_args": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "logits_processors": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "store": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "verbosity": (),
    "vllm_xargs": (),
    "web_search_options": (),
}
"""Fields of OpenAI and vLLM that only a plugin may implement, each with the values that change nothing, beside those of `asks_nothing`."""

_MOST_NAMES = 8
"""Of one request that are told."""
_MOST_TOLD = 256
_told: set[str] = set()
"""Names that the log has."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def asks_nothing(value: Any) -> bool:
    """null, false, and what is empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def is_neutral(name: str, value: Any) -> bool:
    """A field that others know has a value that changes nothing."""
    return name in NEUTRAL and (asks_nothing(value) or any(value == one and type(value) is type(one) for one in NEUTRAL[name]))


def unknown_field(name: str, known: Iterable[str], inside: str = "", hint: str = "") -> PydanticCustomError:
    """The error of a field that there is not, with a hint at what may be meant."""
    name = printable(name)
    hint = hint or nearest(name, known, 1, otherwise="")
    told = {"param": f"{inside}{name}", "hint": f". {hint}" if hint else ""}
    return PydanticCustomError("unknown", "Unrecognized request argument supplied: {param}{hint}", told)


class UnknownFields(Struct):
    """What one request has of them: they are ignored, or refused."""

    lenient: bool
    names: dict[str, None] = field(default_factory=dict)
    """Those that were ignored."""

    def add(self, name: str, known: Iterable[str], inside: str = "") -> None:
        """Raises PydanticCustomError where fields are strict, and for what is no name."""
        whole = f"{inside}{name}"
        if not (self.lenient and _PLAIN.fullmatch(whole)):
            raise unknown_field(name, known, inside)
        if len(self.names) < _MOST_NAMES:
            self.names[whole] = None
        if whole not in _told and len(_told) < _MOST_TOLD:
            _told.add(whole)
            hint = nearest(name, known, 1, otherwise="")
            logger.warning("the field %s of a request is ignored: this server does not know it. %s", whole, hint)

    def drop(self, name: str, why: str) -> None:
        """Ignores a field that clients may not leave out, strict or not."""
        self.names[name] = None
        if name not in _told and len(_told) < _MOST_TOLD:
            _told.add(name)
            logger.warning("the field %s of a request is ignored: %s", name, why)


UNKNOWN: ContextVar[UnknownFields] = ContextVar("UNKNOWN")
"""Of the request that is read."""
STRICT = UnknownFields(lenient=False)
"""A body that comes from elsewhere is to have none."""
