"""Engines as they are watched: what an AsyncLLM tells of itself, and what stands for one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from toolkit_lm.engine import EngineState
from toolkit_lm.events import LoadEvent

if TYPE_CHECKING:
    from toolkit_lm.frontend import Health


class Watched(Protocol):
    """An AsyncLLM, or what stands for one that is being made."""

    def health(self) -> Health: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


def engine_states(engine: Watched) -> list[dict[str, Any]]:
    """Of several engines, each; nothing of one."""
    states: Sequence[EngineState] = getattr(engine, "engines", ())
    return [
        {
            "engine": number,
            "status": one.status,
            **({"reason": one.reason} if one.reason else {}),
            "requests_in_flight": one.num_requests,
            "tokens_in_flight": one.num_tokens,
            "restarts": one.num_restarts,
        }
        for number, one in enumerate(states)
    ]


def total_load(loads: Iterable[LoadEvent]) -> LoadEvent | None:
    """Of several engines together; None of none."""
    found = list(loads)
    if len(found) < 2:
        return found[0] if found else None
    counts = [name for name in LoadEvent.__struct_fields__ if name.startswith("num_")]
    return LoadEvent(
        time=max(one.time for one in found),
        waiting_by_reason=dict(sum((Counter(one.waiting_by_reason) for one in found), Counter())),
        **{name: sum(getattr(one, name) for one in found) for name in counts},
    )
