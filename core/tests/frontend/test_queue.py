"""The front's queue: what it lets in, and whom it refuses."""

from __future__ import annotations

import pytest
from toolkit_lm.config import LimitsConfig
from toolkit_lm.errors import QueueFullError, RequestError
from toolkit_lm.frontend.queue import QueueLimits
from toolkit_lm.messages import EngineRequest
from toolkit_lm.params import SamplingParams


def batch_of(count, first=0, **fields):
    return [
        EngineRequest(
            request_id=str(first + index), prompt_token_ids=[1], params=SamplingParams(), **fields
        )
        for index in range(count)
    ]


def test_each_prompt_of_a_batch_counts():
    queue = QueueLimits(LimitsConfig(max_queued_requests=3))
    with pytest.raises(
        RequestError,
        match=r"4 prompts in one request; no more than 3 requests may wait \(max_queued_",
    ) as error:
        queue.check(batch_of(4))
    assert not isinstance(error.value, QueueFullError), "another try would be in vain"
    queue.check(batch_of(3))
    queue.add(batch_of(3))
    with pytest.raises(QueueFullError, match=r"3 requests wait already \(max_queued_requests\)"):
        queue.check(batch_of(1, first=3))
    queue.admit(["0"])
    queue.check(batch_of(1, first=3))
    with pytest.raises(
        QueueFullError, match=r"2 requests wait already, and these are 2 \(max_queued_requests\)"
    ):
        queue.check(batch_of(2, first=3))


def test_prompts_that_are_pooled_together_count_as_one():
    queue = QueueLimits(LimitsConfig(max_queued_requests=1))
    pooled = batch_of(4, draws_tokens=False)
    queue.check(pooled)
    queue.add(pooled)
    assert queue.num_requests == 1
    queue.admit(["0", "1", "2"])
    assert queue.num_requests == 1, "the last one waits"
    queue.admit(["3"])
    assert queue.num_requests == 0
