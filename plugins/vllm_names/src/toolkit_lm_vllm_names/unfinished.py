"""Requests of an AsyncLLM that have not ended, as vLLM's output processor shows them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType

from toolkit_lm import RequestOutput

_POLL_SECONDS = 0.01


class OutputProcessor:
    """`AsyncLLM.output_processor`: which requests of `generate` have not ended."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    @property
    def request_states(self) -> Mapping[str, int]:
        """Ids of the requests. A value is how many requests have the id, in place of a state."""
        return MappingProxyType(dict(self._counts))

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that run or wait."""
        return self._counts.total()

    def has_unfinished_requests(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self._counts)

    async def counted(
        self, request_id: str, outputs: AsyncGenerator[RequestOutput, None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields a request's outputs. Meanwhile it counts."""
        self._counts[request_id] += 1
        try:
            async for output in outputs:
                yield output
        finally:
            self._counts[request_id] -= 1
            self._counts += Counter()  # without those that are 0
            await outputs.aclose()

    async def drained(self, seconds: float) -> None:
        """Waits until all requests have ended. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while self._counts:
            if time.monotonic() > end:
                count = self.get_num_unfinished_requests()
                raise TimeoutError(f"{count} requests have not ended after {seconds} seconds.")
            await asyncio.sleep(_POLL_SECONDS)
