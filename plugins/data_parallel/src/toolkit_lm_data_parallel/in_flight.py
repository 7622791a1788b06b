"""State of a request on an engine, kept by the front end so that another engine can continue it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from msgspec.structs import replace
from toolkit_lm.events import RequestEvent, RequestEventKind
from toolkit_lm.messages import BegunSequence, EngineOutput, EngineRequest, SamplerState
from toolkit_lm.params import FinishReason

_ONCE = ("queued", "scheduled", "first_token")


@dataclass(slots=True)
class _Begun:
    """One of its sequences."""

    token_ids: list[int] = field(default_factory=list)
    sampler_state: SamplerState = field(default_factory=dict)
    finish_reason: FinishReason | None = None


class InFlight:
    """A request that has not ended."""

    def __init__(self, request: EngineRequest, hashes: list[bytes]) -> None:
        """`hashes`: of the blocks that its prompt begins with. The request keeps the data of its
        media."""
        self.request = request
        self.hashes = hashes
        self.engine = -1
        """The number of the one that has it."""
        self.num_moves = 0
        """Engines that have died under it."""
        self.was_lacking = False
        """Its engine was sent the data of its media once more."""
        self.num_tokens = len(request.prompt_token_ids) + (
            0 if request.encoder is None else request.encoder.num_tokens
        )
        """Tokens of its prompt, and the outputs so far of its unfinished sequences."""
        self._num_prompt_logprobs = request.num_prompt_logprobs
        self._num_cached_tokens: int | None = None
        self._num_left = request.params.num_outputs
        self._sequences: dict[int, _Begun] = {}
        """Sequences that have output, by index."""
        self._forwarded: dict[RequestEventKind, RequestEvent] = {}

    @property
    def has_ended(self) -> bool:
        return self._num_left == 0

    @property
    def unfinished(self) -> list[int]:
        """The indices of the sequences that have not ended."""
        return [
            index
            for index in range(self.request.params.num_outputs)
            if self._sequence(index).finish_reason is None
        ]

    def update(self, output: EngineOutput) -> None:
        """Notes what an engine gave."""
        sequence = self._sequence(output.index)
        sequence.token_ids += output.token_ids
        self.num_tokens += len(output.token_ids)
        self._num_prompt_logprobs += len(output.prompt_logprobs)
        if output.token_ids:
            sequence.sampler_state = output.sampler_state
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        # The engine that goes on finds another part of its tokens.
        output.num_cached_tokens = self._num_cached_tokens
        if output.finish_reason is not None:
            self.end(output.finish_reason, output.index)

    def end(self, reason: FinishReason, index: int) -> None:
        """One of its sequences has ended."""
        sequence = self._sequence(index)
        if sequence.finish_reason is None:
            sequence.finish_reason = reason
            self.num_tokens -= len(sequence.token_ids)
            self._num_left -= 1

    def message(self) -> EngineRequest:
        """Message for an engine: a copy of the request. Beam searches and pooling start again; all
        others continue from their tokens."""
        request = self.request
        if not (self._sequences and request.draws_tokens) or request.params.use_beam_search:
            return replace(request)
        begun = [self._sequence(index) for index in range(request.params.num_outputs)]
        return replace(
            request,
            begun=[
                BegunSequence(
                    list(sequence.token_ids), sequence.sampler_state, sequence.finish_reason
                )
                for sequence in begun
            ],
            num_prompt_logprobs=self._num_prompt_logprobs,
        )

    def forwarded(self, event: RequestEvent) -> RequestEvent | None:
        """An event of its engine as those who watch are to hear it: its beginning once, whichever
        engine that was."""
        if event.kind in _ONCE and self._forwarded.setdefault(event.kind, event) is not event:
            return None
        if not self.num_moves:
            return event
        scheduled = self._forwarded.get("scheduled")
        first = self._forwarded.get("first_token")
        return replace(
            event,
            num_cached_tokens=event.num_cached_tokens
            if self._num_cached_tokens is None
            else self._num_cached_tokens,
            scheduled_time=event.scheduled_time if scheduled is None else scheduled.scheduled_time,
            first_token_time=event.first_token_time if first is None else first.first_token_time,
        )

    def untold(self, reason: FinishReason) -> RequestEvent | None:
        """The event of its end, which its dead engine could not send. None if no event of it was
        ever sent."""
        heard = (
            self._forwarded.get("first_token")
            or self._forwarded.get("scheduled")
            or self._forwarded.get("queued")
        )
        if heard is None:
            return None
        return replace(
            heard,
            kind="aborted" if reason in ("abort", "timeout") else "finished",
            time=time.monotonic(),
            num_output_tokens=sum(len(sequence.token_ids) for sequence in self._sequences.values()),
            finish_reason=reason,
        )

    def _sequence(self, index: int) -> _Begun:
        if index not in self._sequences:
            self._sequences[index] = _Begun()
        return self._sequences[index]
