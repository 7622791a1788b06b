"""Endings: how requests and their sequences end."""

from __future__ import annotations

from collections.abc import Sequence as Collection

from toolkit_lm.messages import EngineOutput
from toolkit_lm.params import FinishReason
from toolkit_lm.scheduler.event_log import EventLog
from toolkit_lm.scheduler.quarantine import Quarantine
from toolkit_lm.scheduler.request import Request, Sequence
from toolkit_lm.scheduler.request_blocks import RequestBlocks
from toolkit_lm.scheduler.roster import Roster


class Endings:
    """Ends sequences, for whatever reason: frees their blocks, and forgets requests whose last
    sequence has ended."""

    def __init__(
        self, roster: Roster, blocks: RequestBlocks, quarantine: Quarantine, events: EventLog
    ) -> None:
        self._roster = roster
        self._blocks = blocks
        self._quarantine = quarantine
        self._events = events

    def end(
        self, request: Request, reason: FinishReason, error: str | None = None
    ) -> list[EngineOutput]:
        """Ends all unfinished sequences of a request, and returns their last outputs."""
        ended = request.unfinished
        self.finish(request, ended, reason)
        return request.outputs_of_end(ended, reason, error)

    def finish(self, request: Request, ended: Collection[Sequence], reason: FinishReason) -> None:
        """Ends some of a request's unfinished sequences."""
        for seq in ended:
            seq.finish_reason = reason
            self.release(seq)
        request.unfinished = [seq for seq in request.unfinished if seq.finish_reason is None]
        if not request.unfinished:
            self._quarantine.release(request.request_id)
            self._roster.remove(request)
            self._blocks.end(request)
            self._events.add(
                "aborted" if reason in ("abort", "timeout") else "finished", request, reason
            )
            # The sequences refer to the request: breaking the cycle frees them at once.
            request.sequences = []

    def release(self, seq: Sequence) -> None:
        """Frees the blocks of a sequence, and has the runner drop it."""
        seq.num_placeholders = 0
        self._blocks.blocks.free(seq.seq_id)
        self._roster.remove_sequence(seq)
