"""Backpressure: limits of the requests in the queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import median

from toolkit_lm.config import LimitsConfig
from toolkit_lm.errors import QueueFullError, RequestError
from toolkit_lm.messages import EngineRequest


class QueueLimits:
    """Counts the requests that the front has sent and the engine has not admitted yet."""

    def __init__(self, config: LimitsConfig) -> None:
        self.max_requests = config.max_queued_requests
        self.max_tokens = config.max_queued_tokens
        self._waiting: dict[str, tuple[float, int]] = {}
        """Arrival time and prompt tokens of each waiting request, by id."""
        self._counted: set[str] = set()
        """Ids of the requests that count. Prompts pooled together count as one: the last, which is
        admitted last."""
        self._waits: deque[float] = deque(maxlen=32)
        """Waiting times of the last admitted requests, in seconds."""

    @property
    def num_requests(self) -> int:
        return len(self._counted)

    @property
    def num_tokens(self) -> int:
        # Copied in one go: other threads may ask while requests come and go.
        return sum(tokens for _, tokens in list(self._waiting.values()))

    def check(self, batch: Sequence[EngineRequest]) -> None:
        """Raises QueueFullError if one more batch exceeds a limit. Prompts that are pooled together
        count as one request.

        Raises RequestError for a batch that does not fit into an empty queue. Prompts longer than
        the limit are admitted if none waits.
        """
        tokens = sum(_num_tokens(request) for request in batch)
        added = len(batch) if batch[0].draws_tokens else 1
        most = None if self.max_requests is None else max(self.max_requests, 1)
        if most is not None and added > most:
            raise RequestError(
                f"{added} prompts in one request; no more than {most} requests may wait "
                "(max_queued_requests). Split it.",
                "prompt",
            )
        if most is not None and self.num_requests + added > most:
            more = f", and these are {added}" if added > 1 else ""
            limit = f"{self.num_requests} requests wait already{more} (max_queued_requests)"
        elif (
            self.max_tokens is not None
            and self._waiting
            and self.num_tokens + tokens > self.max_tokens
        ):
            limit = (
                f"{self.num_tokens} prompt tokens wait already (max_queued_tokens is "
                f"{self.max_tokens})"
            )
        else:
            return
        retry_after = min(max(median(self._waits), 1.0), 60.0) if self._waits else 1.0
        raise QueueFullError(f"the engine is busy: {limit}. Try again later.", retry_after)

    def add(self, batch: Sequence[EngineRequest]) -> None:
        now = time.monotonic()
        self._waiting.update((request.request_id, (now, _num_tokens(request))) for request in batch)
        pools = not batch[-1].draws_tokens
        self._counted.update(request.request_id for request in (batch[-1:] if pools else batch))

    def admit(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._waiting:
                self._waits.append(time.monotonic() - self._waiting[request_id][0])
            self.discard(request_id)

    def discard(self, request_id: str) -> None:
        """Removes a request that was admitted or has ended. Unknown ones are accepted."""
        self._waiting.pop(request_id, None)
        self._counted.discard(request_id)


def _num_tokens(request: EngineRequest) -> int:
    """Number of tokens of a request's prompt and of its encoder's."""
    return len(request.prompt_token_ids) + (
        0 if request.encoder is None else request.encoder.num_tokens
    )
