"""cache_control: how long a request's prompt is to stay in the cache.

Source: https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit_lm.errors import RequestError

_MOST = 4
"""Most breakpoints of a request."""
_TIMES = ("5m", "1h")
"""Values of `ttl`, the shorter first. The first is the default."""


def retention(
    messages: list[dict[str, Any]], system: Any, tools: Any, own: Mapping[str, Any] | None
) -> str | None:
    """Returns the longest time that a request's breakpoints ask for; None: it has none. `own`: the
    body's `cache_control`. Raises RequestError."""
    found = list(_breakpoints(messages, system, tools))
    if own is not None:
        found.append(("cache_control", own))
    if len(found) > _MOST:
        raise RequestError(
            f"cache_control: at most {_MOST} blocks may have it, and {len(found)} do.",
            "cache_control",
        )
    times = [_time(where, value) for where, value in found]
    return max(times, key=_TIMES.index, default=None)


def _breakpoints(messages: Any, system: Any, tools: Any) -> Iterator[tuple[str, Any]]:
    """Yields the place and value of each `cache_control` in blocks."""
    places = [("system", system), ("tools", tools)]
    for number, message in enumerate(messages):
        places.append((f"messages[{number}].content", message.get("content")))
    while places:
        name, blocks = places.pop()
        for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if not isinstance(block, dict):
                continue
            where = f"{name}[{index}]"
            if (value := block.get("cache_control")) is not None:
                yield f"{where}.cache_control", value
            # Results of tools have blocks of their own, and those have none.
            if block.get("type") == "tool_result":
                places.append((f"{where}.content", block.get("content")))


def _time(where: str, value: Any) -> str:
    if isinstance(value, Mapping) and value.get("type") == "ephemeral":
        ttl = value.get("ttl") or _TIMES[0]
        if ttl in _TIMES:
            return str(ttl)
    raise RequestError(
        f'{where} must be {{"type": "ephemeral"}}, with a ttl of "5m" or "1h".', "cache_control"
    )
