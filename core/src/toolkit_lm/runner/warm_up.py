"""Steps that a worker runs before the first request: one measures memory, and others do what the
first request would wait for."""

from __future__ import annotations

import contextlib
import re
import time
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from toolkit_lm.config import parse_memory
from toolkit_lm.errors import CheckpointError
from toolkit_lm.kv import max_drafts, plan_groups
from toolkit_lm.messages import NewSequence, ScheduledSequence, StepPlan, StepResult
from toolkit_lm.model import FallbackModel
from toolkit_lm.params import SamplingParams
from toolkit_lm.runner.model_runner import ModelRunner
from toolkit_lm.runner.proof import prove

_KEPT_BYTES = 2**25 - 2**16
"""Slightly below the largest threshold that glibc adapts to."""
_MEASURING = 1.0
"""Seconds after which no other step is measured."""
_KEPT = 0.5
"""Seconds of measuring from which drafters keep what was measured."""
_TIMED = 3
"""Steps of which the fastest counts."""
_GREEDY = SamplingParams(temperature=0)
_MOST_MEMORY = SamplingParams(top_p=1 - 1e-7)
"""So large a top_p that all tokens are sorted, which needs the most memory."""


def warm_up(runner: ModelRunner) -> None:
    """Runs a prompt of two tokens, and for a generating model a decode, of a made-up sequence that
    is then dropped.

    A fallback's first warm-up also checks it; later ones, after a failed step, do not. The steps
    leave garbage in the first blocks. All ranks of an engine run it at the same time. Raises
    CheckpointError if logits, or pooled values, are not finite, before the first request finds out.
    """
    if runner.device.type == "cpu":
        # Once an allocation of this size was freed, glibc keeps the memory of activations and does
        # not request its pages anew.
        torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    if (
        isinstance(runner.model, FallbackModel)
        and runner.config.model.verify_fallback
        and not runner.is_proven
    ):
        result = prove(runner)
        runner.is_proven = True
    else:
        result = _compute_tokens(runner, 2)
    if result.errors:
        pools = runner.config.model.runner == "pooling"
        task = f"serve the task {_task(runner)!r}" if pools else "draw a first token"
        raise CheckpointError(f"the model cannot {task}: {result.errors[-1]}.{_cause(runner)}")
    measure_drafts(runner)
    if runner.compiler is not None:
        runner.compiler.capture(lambda: _compute_tokens(runner, 1))
        runner.compiler.seal()


def measure_drafts(runner: ModelRunner) -> None:
    """Measures decode steps with and without drafts, for the drafting part, once. Leaves out
    those that drafters know of earlier starts.

    Several ranks would have to agree on when to end, and graphs are captured for other shapes:
    there the steps that run are measured alone.
    """
    config = runner.config
    drafting: Any = runner.parts.by_name.get("drafter")
    if (
        drafting is None
        or drafting.step_times
        or config.scheduler.draft_budget == "all"
        or config.parallel.num_ranks > 1
        or runner.compiler is not None
    ):
        return
    most = min(max_drafts(group.spec for group in runner.kv_cache.groups), 7)
    steps = drafting.step_times
    steps += drafting.ask_first(lambda drafter: drafter.known_steps()) or []
    known = {step[:2] for step in steps}
    begun = time.perf_counter()
    # Steps that ask no drafter come first, and then those of few tokens, whatever they verify.
    for size, rows in sorted(product((0, 1, 2, 4, 8), (1, 4, 16, 64)), key=prod):
        num_drafts = size - 1
        if (
            (rows, num_drafts) not in known
            and num_drafts <= most
            and _TIMED * size + drafting.lookahead + 2 <= config.max_model_len
            and rows * size <= config.scheduler.token_budget
            and rows <= config.scheduler.max_num_seqs
            and time.perf_counter() - begun < _MEASURING
        ):
            steps.append((rows, num_drafts, _seconds_of_decode(runner, rows, num_drafts)))
    if time.perf_counter() - begun > _KEPT:
        drafting.ask_first(lambda drafter: drafter.keep_steps(steps))


def _seconds_of_decode(runner: ModelRunner, rows: int, num_drafts: int) -> float:
    """Seconds of a decode step of made-up sequences, the least of some. -1 drafts: no drafter is
    asked."""
    asks = num_drafts >= 0
    num_drafts = max(num_drafts, 0)
    tokens = [0] * (num_drafts + 1)
    plan = _made_up(runner, rows, 1, room=_TIMED * len(tokens) + 1)
    plan.asks_drafters = False
    runner.execute(plan)
    nothing_new: list[list[int]] = [[] for _ in runner.kv_cache.groups]
    starts = {seq.seq_id: 1 for seq in plan.new}
    seconds = []
    for _ in range(_TIMED):
        decode = StepPlan(
            scheduled=[
                ScheduledSequence(seq_id, start, len(tokens), nothing_new, True, tokens, num_drafts)
                for seq_id, start in starts.items()
            ],
            asks_drafters=asks,
            max_drafts=dict.fromkeys(starts, num_drafts or 1),
        )
        begun = time.perf_counter()
        result = runner.execute(decode)
        seconds.append(time.perf_counter() - begun)
        for seq_id, drawn in zip(starts, result.token_ids, strict=True):
            starts[seq_id] += len(drawn)
    runner.execute(_drop(plan))
    return min(seconds)


def _compute_tokens(runner: ModelRunner, num_tokens: int) -> StepResult:
    """Result of a prompt of `num_tokens`. A generating model computes one more token after it."""
    plan = _made_up(runner, 1, num_tokens)
    result = runner.execute(plan)
    if runner.config.model.runner != "pooling" and not result.errors:
        nothing_new: list[list[int]] = [[] for _ in runner.kv_cache.groups]
        runner.execute(
            StepPlan(scheduled=[ScheduledSequence(-1, num_tokens, 1, nothing_new, True, [0])])
        )
    runner.execute(_drop(plan))
    return result


def _cause(runner: ModelRunner) -> str:
    """Names a weight that is not finite, if there is one. Reads the checkpoint again, since layers
    may store their weights in another form."""
    checkpoint = runner.config.checkpoint
    assert checkpoint is not None, "the config is not resolved: it has no checkpoint"
    loader = runner.plugins.loaders.make(
        runner.config.load.load_format, checkpoint.source or checkpoint.path
    )
    for name, weight in chain(loader, runner.model.named_parameters()):
        if not weight.float().isfinite().all():
            return f" The weight {name!r} holds NaN or infinity."
    return ""


def profile(runner: ModelRunner) -> int:
    """Bytes of the largest step, CUDA graphs and parts' reserves, if the KV cache gets a share of
    the memory; otherwise 0.

    All rows of that step sample with top-p. All ranks of an engine run it at the same time, before
    the cache is made. The allocator of a GPU keeps the step's memory, which is then no longer free
    and not counted. If the system does not report a process' peak, the step counts as 0.
    """
    cache = runner.config.cache
    scheduler = runner.config.scheduler
    on_gpu = runner.device.type == "cuda"
    shares = (
        on_gpu
        if cache.kv_cache_memory == "auto"
        else isinstance(parse_memory(cache.kv_cache_memory), float)
    )
    if cache.num_kv_blocks is not None or not shares or not runner.kv_cache_specs():
        return 0
    length = max(
        1, min(scheduler.token_budget // scheduler.max_num_seqs, runner.config.max_model_len - 1)
    )
    if most_encoded := runner.config.max_encoder_len:
        length = max(1, min(length // 2, most_encoded))
    kv_cache = plan_groups(
        runner.kv_cache_specs(),
        {layer: selection.name for layer, selection in runner.selections.items()},
    )
    least = kv_cache.max_blocks(length + 1, length + 1, runner.config.max_encoder_len)
    runner.init_kv_cache(kv_cache.sized(least, [0] * len(kv_cache.pools)))
    graphs = (
        0
        if runner.compiler is None
        else runner.compiler.estimate(lambda: _compute_tokens(runner, 1))
    )
    # All of them write into the same blocks.
    plan = _made_up(runner, scheduler.max_num_seqs, length, _MOST_MEMORY)
    with contextlib.suppress(OSError):
        # The peak begins anew.
        Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    runner.execute(plan)
    peak = _resident("VmHWM")
    runner.execute(_drop(plan))
    reserved: int = sum(reserve() for reserve in runner.parts.calls("reserved_bytes"))
    return reserved + graphs + (0 if on_gpu else max(0, peak - before))


def _resident(name: str) -> int:
    """Bytes of memory that this process has ("VmRSS"), or had at its peak ("VmHWM"); 0 if the
    system does not report it."""
    with contextlib.suppress(OSError):
        if found := re.search(
            rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
        ):
            return int(found[1]) * 1024
    return 0


def _made_up(
    runner: ModelRunner,
    num_sequences: int,
    num_tokens: int,
    params: SamplingParams = _GREEDY,
    room: int = 1,
) -> StepPlan:
    """Plan of one step that computes sequences -1, -2, ... of this many tokens in the first blocks,
    with room for more tokens."""
    groups = [group.spec for group in runner.kv_cache.groups]
    samples = runner.config.model.runner != "pooling"
    plan = StepPlan()
    for index in range(num_sequences):
        new = NewSequence(
            seq_id=-1 - index,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            block_tables=[
                [] if spec.of_encoder else list(range(spec.num_blocks(num_tokens + room)))
                for spec in groups
            ],
            params=params,
            seed=0,
            stop_token_ids=[],
        )
        plan.new.append(new)
        plan.scheduled.append(
            ScheduledSequence(new.seq_id, 0, num_tokens, [[] for _ in groups], samples)
        )
    for add_example in runner.parts.calls("example"):
        add_example(plan)
    for encoder in plan.encoders:
        encoder.block_tables = [
            list(range(spec.num_blocks(encoder.num_tokens))) if spec.of_encoder else []
            for spec in groups
        ]
    return plan


def _task(runner: ModelRunner) -> str:
    """Task that the warm-up pools for."""
    plan = _made_up(runner, 1, 1)
    pooling = plan.new[0].inputs.pooling
    return "embed" if pooling is None else pooling.task


def _drop(plan: StepPlan) -> StepPlan:
    """Plan that drops a made-up plan's sequences."""
    return StepPlan(
        dropped=[
            *(seq.seq_id for seq in plan.new),
            *(encoder.encoder_id for encoder in plan.encoders),
        ],
        dropped_items=[item.identifier for item in plan.encode],
    )
