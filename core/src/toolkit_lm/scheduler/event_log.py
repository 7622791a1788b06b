"""EventLog: records request events for plugins."""

from __future__ import annotations

import time

from toolkit_lm.events import LoadEvent, RequestEvent, RequestEventKind
from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.params import FinishReason
from toolkit_lm.scheduler.request import Request
from toolkit_lm.scheduler.roster import Roster


class EventLog:
    """Records events in order until they are taken. It also notes on a request when it was first
    scheduled and when it got its first token."""

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []

    def drain(self) -> list[RequestEvent]:
        """Returns the events since the last call."""
        events, self._events = self._events, []
        return events

    def scheduled(self, request: Request) -> None:
        """Records that the request is scheduled for the first time."""
        request.scheduled_time = time.monotonic()
        self.add("scheduled", request)

    def first_token(self, request: Request) -> None:
        """Records a request's first token, or first candidates. Later tokens make no event."""
        if request.first_token_time is None:
            request.first_token_time = time.monotonic()
            self.add("first_token", request)

    def add(
        self, kind: RequestEventKind, request: Request, reason: FinishReason | None = None
    ) -> None:
        """`reason`: finish reason of the sequence that ended last."""
        self._events.append(
            RequestEvent(
                kind=kind,
                request_id=request.request_id,
                time=time.monotonic(),
                arrival_time=request.arrival_time,
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
                num_output_tokens=request.num_output_tokens,
                num_sequences=request.params.n if request.search else len(request.sequences),
                scheduled_time=request.scheduled_time,
                first_token_time=request.first_token_time,
                finish_reason=reason,
                waited_for=None if request.waits is None else str(request.waits),
                context=request.context,
            )
        )


def load_event(roster: Roster, blocks: BlockManager) -> LoadEvent:
    """Returns the engine's present load."""
    waits = {reason: count for reason, count in roster.waits.items() if count}
    if roster.loading:
        waits["loading"] = len(roster.loading)
    return LoadEvent(
        time=time.monotonic(),
        num_running=roster.num_running,
        num_waiting=len(roster.waiting) + len(roster.loading),
        waiting_by_reason=waits,
        num_used_blocks=blocks.num_used,
        num_total_blocks=sum(pool.num_blocks for pool in blocks.pools),
        num_cached_blocks=sum(pool.num_cached for pool in blocks.pools),
        num_used_host_blocks=blocks.num_used_on_host,
        num_total_host_blocks=sum(pool.num_blocks for pool in blocks.host_pools),
    )
