"""Results of pooling requests: from the engine's arrays to users' outputs."""

from __future__ import annotations

import threading

from toolkit_lm.messages import EngineOutput, EngineRequest
from toolkit_lm.outputs import PoolingOutput, PoolingRequestOutput
from toolkit_lm.params import FinishReason
from toolkit_lm.processing.request_state import RequestState


class PoolingState:
    """One pooling request. It has one result, or none yet."""

    def __init__(self, request: EngineRequest, prompt: str | None) -> None:
        self.request = request
        self.request_id = request.request_id
        self.lock = threading.Lock()
        """Held while one thread changes the state and another may read its output."""
        self._output = PoolingRequestOutput(
            request.request_id, prompt, request.prompt_token_ids, PoolingOutput(None), None
        )

    @property
    def finished(self) -> bool:
        return self._output.finished

    def apply(self, output: EngineOutput) -> bool:
        """Stores the result. False: the engine knows that the request has ended."""
        if output.pooled is not None:
            self._output.outputs.data = output.pooled.to_numpy()
        self._output.num_cached_tokens = output.num_cached_tokens
        self._output.error = output.error
        self._output.finish_reason = output.finish_reason
        return False

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends the request from outside."""
        if not self.finished:
            self._output.finish_reason = reason
            self._output.error = error

    def next_output(self) -> PoolingRequestOutput | None:
        """Returns the result, once there is one."""
        return self._output if self.finished else None

    def snapshot(self) -> PoolingRequestOutput:
        """Returns the result, or an output without data if there is none yet."""
        return self._output


AnyState = RequestState | PoolingState
