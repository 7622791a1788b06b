"""Engines as the server watches them: the figures of an AsyncLLM, or of its stand-in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from toolkit_lm.engine import EngineState
from toolkit_lm.events import LoadEvent

if TYPE_CHECKING:
    from toolkit_lm.frontend import Health


class Watched(Protocol):
    """An AsyncLLM, or a stand-in for one that is being made."""

    def health(self) -> Health: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


def engine_states(engine: Watched) -> list[dict[str, Any]]:
    """The state of each engine where there are several. Empty for one."""
    states: Sequence[EngineState] = getattr(engine, "engines", ())
    return [
        {
            "engine": number,
            "status": state.status,
            **({"reason": state.reason} if state.reason else {}),
            "requests_in_flight": state.num_requests,
            "tokens_in_flight": state.num_tokens,
            "restarts": state.num_restarts,
        }
        for number, state in enumerate(states)
    ]


def total_load(loads: Iterable[LoadEvent]) -> LoadEvent | None:
    """The loads of all engines together. None where there is none."""
    found = list(loads)
    if len(found) < 2:
        return found[0] if found else None
    counts = [name for name in LoadEvent.__struct_fields__ if name.startswith("num_")]
    return LoadEvent(
        time=max(load.time for load in found),
        waiting_by_reason=dict(sum((Counter(load.waiting_by_reason) for load in found), Counter())),
        **{name: sum(getattr(load, name) for load in found) for name in counts},
    )
