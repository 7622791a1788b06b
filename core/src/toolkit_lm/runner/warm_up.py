"""The steps that a worker runs before the first request: they take what that one would otherwise wait for."""

from __future__ import annotations

import torch

from toolkit_lm.messages import NewSequence, ScheduledSequence, SequenceInputs, StepPlan
from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.runner.model_runner import ModelRunner

_KEPT_BYTES = 2**25 - 2**16
"""A little below the most that glibc adapts to."""


def warm_up(runner: ModelRunner) -> None:
    """A prompt of two tokens, and where text is generated a decode, of a made-up sequence that is then forgotten.

    They leave garbage in the first blocks. All ranks of an engine run it at the same time.
    """
    if runner.device.type == "cpu":
        # Once glibc has seen an allocation of this size freed, it keeps the memory of activations instead of asking for its pages anew.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    generates = runner.config.model.runner != "pooling"
    new = _made_up(runner, -1, 2)
    nothing_new: list[list[int]] = [[] for _ in runner.kv_cache.groups]
    runner.execute(StepPlan(new=[new], scheduled=[ScheduledSequence(-1, 0, 2, nothing_new, generates)]))
    if generates:
        runner.execute(StepPlan(scheduled=[ScheduledSequence(-1, 2, 1, nothing_new, True, [0])]))
    runner.execute(StepPlan(dropped=[-1]))


def _made_up(runner: ModelRunner, seq_id: int, num_tokens: int) -> NewSequence:
    """A sequence of so many tokens in the first blocks, with room for one more."""
    generates = runner.config.model.runner != "pooling"
    return NewSequence(
        seq_id=seq_id,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        block_tables=[list(range(group.spec.num_blocks(num_tokens + 1))) for group in runner.kv_cache.groups],
        params=SamplingParams(temperature=0),
        seed=0,
        stop_token_ids=[],
        inputs=SequenceInputs(pooling=None if generates else PoolingParams(task=next(iter(runner.pooling_rules())))),
    )
