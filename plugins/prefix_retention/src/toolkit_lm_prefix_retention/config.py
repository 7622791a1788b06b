"""Values of `kv_cache_retention_config`, as in TensorRT-LLM. Needs no torch.

Source: https://nvidia.github.io/TensorRT-LLM/features/kvcache.html
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct
from toolkit_lm.errors import RequestError, nearest

from toolkit_lm_prefix_retention.order import DEFAULT

FIELD = "kv_cache_retention_config"
_MOST_RANGES = 64
_MOST_SECONDS = 86400.0
"""Time of what has no duration, and the longest of all: as long as prompt_cache_retention's."""
_RANGES = "token_range_retention_configs"
_FIELDS = (_RANGES, "decode_retention_priority", "decode_duration_ms")
_OF_RANGE = ("token_start", "token_end", "priority", "duration_ms")


class Range(Struct, frozen=True, array_like=True):
    """The priority of some tokens."""

    start: int
    end: int | None
    """None: to the end of the prompt."""
    priority: int
    seconds: float

    def holds(self, position: int) -> bool:
        return self.start <= position and (self.end is None or position < self.end)


def ranges_of(config: Mapping[str, Any]) -> tuple[list[Range], Range | None]:
    """Returns the ranges of a prompt, and that of the generated tokens, if they have a priority of
    their own. Raises RequestError."""
    _check_names(config, _FIELDS, FIELD)
    items = config.get(_RANGES) or []
    if not isinstance(items, list) or len(items) > _MOST_RANGES:
        raise _wrong(_RANGES, f"must be a list of {_MOST_RANGES} ranges at most", items)
    found = []
    for index, item in enumerate(items):
        where = f"{_RANGES}[{index}]"
        if not isinstance(item, Mapping):
            raise _wrong(where, f"must be a mapping of {', '.join(_OF_RANGE)}", item)
        _check_names(item, _OF_RANGE, f"{FIELD}.{where}")
        start = _number(item.get("token_start", 0), f"{where}.token_start", 0, 2**31)
        end = item.get("token_end")
        if end is not None:
            end = _number(end, f"{where}.token_end", start + 1, 2**31)
        priority = _number(item.get("priority", DEFAULT), f"{where}.priority", 0, 100)
        seconds = _seconds(item.get("duration_ms"), f"{where}.duration_ms")
        found.append(Range(start, end, priority, seconds))
    found.sort(key=lambda each: each.start)
    for before, after in pairwise(found):
        if before.end is None or before.end > after.start:
            raise RequestError(
                f"{FIELD}.{_RANGES}: two ranges have the token {after.start}. Give each token one.",
                FIELD,
            )
    seconds = _seconds(config.get("decode_duration_ms"), "decode_duration_ms")
    stated = config.get("decode_retention_priority")
    priority = _number(DEFAULT if stated is None else stated, "decode_retention_priority", 0, 100)
    decode = None if priority == DEFAULT else Range(0, None, priority, seconds)
    return found, decode


def _check_names(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in known:
            raise RequestError(f"{where} has no {name!r}. {nearest(str(name), known)}", FIELD)


def _number(value: Any, where: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _wrong(where, f"must be an integer from {least} to {most}", value)
    return value


def _seconds(value: Any, where: str) -> float:
    if value is None:
        return _MOST_SECONDS
    if type(value) not in (int, float) or not 0 < value < 1e15:
        raise _wrong(where, "must be a positive number of milliseconds", value)
    return min(float(value) / 1000, _MOST_SECONDS)


def _wrong(where: str, words: str, value: Any) -> RequestError:
    return RequestError(f"{FIELD}.{where} {words}, not {str(value)[:80]!r}.", FIELD)
