"""The steps that a worker runs before the first request: one tells what memory it takes, others what it would wait for."""

from __future__ import annotations

import contextlib
import re
from itertools import chain
from pathlib import Path

import torch

from toolkit_lm.attention import plan_groups
from toolkit_lm.config import parse_memory
from toolkit_lm.errors import CheckpointError
from toolkit_lm.messages import EncoderInput, NewEncoder, NewSequence, ScheduledSequence, SequenceInputs, StepPlan
from toolkit_lm.model import EncoderDecoderModel
from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.runner.model_runner import ModelRunner

_KEPT_BYTES = 2**25 - 2**16
"""A little below the most that glibc adapts to."""


def warm_up(runner: ModelRunner) -> None:
    """A prompt of two tokens, and where text is generated a decode, of a made-up sequence that is then forgotten.

    They leave garbage in the first blocks. All ranks of an engine run it at the same time. Raises CheckpointError where logits, or what is
    pooled, are not finite: so the first request would find out.
    """
    if runner.device.type == "cpu":
        # Once glibc has seen an allocation of this size freed, it keeps the memory of activations instead of asking for its pages anew.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    generates = runner.config.model.runner != "pooling"
    plan = _made_up(runner, 1, 2)
    [new] = plan.new
    nothing_new: list[list[int]] = [[] for _ in runner.kv_cache.groups]
    result = runner.execute(plan)
    if result.errors:
        what = "draw a first token" if new.inputs.pooling is None else f"serve the task {new.inputs.pooling.task!r}"
        raise CheckpointError(f"the model cannot {what}: {result.errors[-1]}.{_cause(runner)}")
    if generates:
        runner.execute(StepPlan(scheduled=[ScheduledSequence(-1, 2, 1, nothing_new, True, [0])]))
    runner.execute(StepPlan(dropped=[-1, -2]))


def _cause(runner: ModelRunner) -> str:
    """Names a weight that is not finite, where there is one. It reads the checkpoint again: layers may hold their weights otherwise."""
    checkpoint = runner.config.checkpoint
    assert checkpoint is not None, "the config is not resolved: it has no checkpoint"
    loader = runner.plugins.loaders.make(runner.config.load.load_format, checkpoint.source or checkpoint.path)
    for name, weight in chain(loader, runner.model.named_parameters()):
        if not weight.float().isfinite().all():
            return f" The weight {name!r} holds NaN or infinity."
    return ""


def profile(runner: ModelRunner) -> int:
    """Bytes that the largest step takes beside weights and cache, where the cache gets a share of the memory; else 0.

    All ranks of an engine run it at the same time, before the cache is made. The allocator of a GPU keeps what the step took, so that it
    is no longer free there, and 0 is returned. Where the system does not tell a process' peak, nothing is known.
    """
    cache, scheduler, on_gpu = runner.config.cache, runner.config.scheduler, runner.device.type == "cuda"
    shares = on_gpu if cache.kv_cache_memory == "auto" else isinstance(parse_memory(cache.kv_cache_memory), float)
    if cache.num_kv_blocks is not None or not shares or not runner.kv_cache_specs():
        return 0
    length = max(1, min(scheduler.token_budget // scheduler.max_num_seqs, runner.config.max_model_len - 1))
    if most_encoded := runner.config.max_encoder_len:
        length = max(1, min(length // 2, most_encoded))
    kv_cache = plan_groups(runner.kv_cache_specs(), {layer: selection.name for layer, selection in runner.selections.items()})
    runner.init_kv_cache(kv_cache.sized(kv_cache.max_blocks(length + 1, length + 1, length + 1), [0] * len(kv_cache.pools)))
    # All of them write into the same blocks.
    plan = _made_up(runner, scheduler.max_num_seqs, length)
    with contextlib.suppress(OSError):
        # The peak begins anew.
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    runner.execute(plan)
    peak = _resident("VmHWM")
    runner.execute(StepPlan(dropped=[*(seq.seq_id for seq in plan.new), *(one.encoder_id for one in plan.encoders)]))
    return 0 if on_gpu else max(0, peak - before)


def _resident(name: str) -> int:
    """Bytes of memory that this process has ("VmRSS"), or had at its peak ("VmHWM"); 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return 0


def _made_up(runner: ModelRunner, num_sequences: int, num_tokens: int) -> StepPlan:
    """Computes sequences -1, -3, ... of so many tokens in the first blocks, with room for one more. Their encoders' are -2, -4, ..."""
    generates = runner.config.model.runner != "pooling"
    tables = [list(range(group.spec.num_blocks(num_tokens + 1))) for group in runner.kv_cache.groups]
    of_encoder = [group.spec.of_encoder for group in runner.kv_cache.groups]
    nothing_new: list[list[int]] = [[] for _ in tables]
    plan = StepPlan()
    for seq_id in range(-1, -1 - 2 * num_sequences, -2):
        new = NewSequence(
            seq_id=seq_id,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_tables=[[] if encoded else table for table, encoded in zip(tables, of_encoder, strict=True)],
            params=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=[],
            inputs=SequenceInputs(pooling=None if generates else PoolingParams(task=next(iter(runner.pooling_rules())))),
        )
        if isinstance(runner.model, EncoderDecoderModel):
            new.encoder_id = seq_id - 1
            cross = [table if encoded else [] for table, encoded in zip(tables, of_encoder, strict=True)]
            encoded = EncoderInput(token_ids=[0] * num_tokens)
            plan.encoders.append(NewEncoder(encoder_id=seq_id - 1, num_tokens=num_tokens, block_tables=cross, input=encoded))
        plan.new.append(new)
        plan.scheduled.append(ScheduledSequence(seq_id, 0, num_tokens, nothing_new, generates))
    return plan
