"""Check at the start that a fallback in the engine computes the same as its model alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import NewSequence, ScheduledSequence, StepPlan, StepResult
from toolkit_lm.model import FallbackModel
from toolkit_lm.params import SamplingParams
from toolkit_lm.runner.model_runner import ModelRunner
from toolkit_lm.step import StepPart

logger = logging.getLogger(__name__)

_CHUNKS = (6, 3)
"""Prompt tokens per step of a made-up prompt, if there is room."""
_ATTEMPTS = 3
"""Number of sequences that must differ before a model is refused. Rounding may select another
expert for a token, but in few sequences."""
_FLOAT32_ERROR = 1e-4
"""Largest difference of a logit in float32. If the largest logit is above 1, the limit is a
multiple of it."""
_HALF_FACTOR = 1.5
"""Largest ratio of the engine's error to the model's own error in half precision. Both are root
mean squares against float32."""
_HALF_FLOOR = 2.0**-10
"""Error of half precision whatever is computed, as a share of the root mean square."""


@dataclass
class _Seen(StepPart):
    """Keeps the hidden states of the steps that it sees."""

    hidden_states: list[Tensor] = field(default_factory=list)

    def finish(self, inputs: Any, hidden_states: Tensor, result: StepResult, step: Any) -> None:
        self.hidden_states.append(hidden_states.clone())


def prove(runner: ModelRunner) -> StepResult:
    """Computes a made-up sequence in steps, as requests are computed, and compares it with the
    model's result for the whole sequence.

    For a generating model there are two chunks of a prompt and a decode, otherwise one prompt.
    Returns the result of the step that samples a first token or pools. Raises UnsupportedError,
    with the numbers, if they differ by more than rounding. If weights and KV cache leave too little
    memory for the model alone, the comparison is skipped with a log message.
    """
    architecture = runner.config.hf_config["architectures"][0]
    generates = runner.config.model.runner != "pooling"
    chunks, tables = _room(runner, (*_CHUNKS, 1) if generates else (sum(_CHUNKS),))
    for attempt in range(_ATTEMPTS):
        tokens = _tokens(runner, sum(chunks), attempt)
        seen = _Seen()
        with runner.parts.with_part("proof", seen):
            result = _run(runner, tokens, chunks, tables)
        if result.errors:
            return result
        try:
            error, allowed = _errors(
                runner, torch.tensor(tokens, device=runner.device), torch.cat(seen.hidden_states)
            )
        except torch.OutOfMemoryError as full:
            logger.warning(
                "it is not shown that the engine computes %s as the model by itself does: %s",
                architecture,
                full,
            )
            return result
        if error <= allowed:
            return result
    dtype = runner.config.model.dtype
    raise UnsupportedError(
        f"the engine does not compute {architecture} as the model by itself does: "
        f"{'logits' if generates else 'hidden states'} of "
        f"{len(tokens)} made-up tokens differ by {error:.3g}, and {allowed:.3g} is what {dtype} "
        "explains. "
        "verify_fallback=False runs it all the same."
    )


def _room(runner: ModelRunner, chunks: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """Shortens the chunks to the room in steps, sequences and the cache. Returns them with the
    blocks of each KV group."""
    scheduler = runner.config.scheduler
    groups = runner.kv_cache.groups
    pools = runner.kv_cache.pools
    most = max(scheduler.token_budget, scheduler.max_num_seqs, 2)
    found = [min(chunk, most) for chunk in chunks]
    while True:
        counts = [group.spec.num_blocks(sum(found)) for group in groups]
        in_pools = [
            sum(count for count, group in zip(counts, groups, strict=True) if group.pool == i)
            for i in range(len(pools))
        ]
        fits = all(count <= pool.num_blocks for count, pool in zip(in_pools, pools, strict=True))
        if (fits and sum(found) <= runner.config.max_model_len) or max(found) == 1:
            break
        found[found.index(max(found))] -= 1
    starts = [
        sum(counts[j] for j in range(i) if groups[j].pool == groups[i].pool)
        for i in range(len(groups))
    ]
    return found, [
        list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)
    ]


def _tokens(runner: ModelRunner, count: int, attempt: int) -> list[int]:
    """Returns different tokens from the middle of the vocabulary. None is padding, which has no
    position of its own in some models."""
    size = runner.config.vocab_size or 2
    padding = runner.config.hf_config.get("pad_token_id")
    usable = [
        token for token in range(size // 4, max(size // 4 + 2, 3 * size // 4)) if token != padding
    ]
    return [usable[(7 * i + 3 * attempt) % len(usable)] for i in range(count)]


def _run(
    runner: ModelRunner, tokens: list[int], chunks: list[int], tables: list[list[int]]
) -> StepResult:
    """Computes all tokens but the decoded one. Returns the result of the step with the prompt's
    last token."""
    generates = len(chunks) > 1
    nothing_new: list[list[int]] = [[] for _ in tables]
    num_prompt_tokens = sum(chunks[:-1]) if generates else sum(chunks)
    new = NewSequence(
        seq_id=-1,
        token_ids=tokens[:num_prompt_tokens],
        num_prompt_tokens=num_prompt_tokens,
        block_tables=tables,
        params=SamplingParams(temperature=0),
        seed=0,
        stop_token_ids=[],
    )
    results = []
    dropped = [-1]
    start = 0
    for chunk in chunks:
        end = start + chunk
        decodes = start >= num_prompt_tokens
        row = ScheduledSequence(
            -1,
            start,
            chunk,
            nothing_new,
            generates and end >= num_prompt_tokens,
            tokens[start:end] if decodes else [],
        )
        plan = StepPlan(new=[] if start else [new], scheduled=[row])
        for add_example in runner.parts.calls("example") if start == 0 else ():
            add_example(plan)
        for encoder in plan.encoders:
            encoder.block_tables = tables
            dropped.append(encoder.encoder_id)
        results.append(runner.execute(plan))
        start = end
    runner.execute(StepPlan(dropped=dropped))
    return results[-2 if generates else -1]


def _errors(runner: ModelRunner, token_ids: Tensor, hidden_states: Tensor) -> tuple[float, float]:
    """Returns the difference of the engine's logits, or hidden states, from the model's own, and
    the largest allowed difference."""
    model = runner.model
    assert isinstance(model, FallbackModel)
    with torch.inference_mode():
        plain = model.plain(token_ids)
        if plain is None:
            return 0.0, 0.0
        ours = (
            model.compute_logits(hidden_states)
            if runner.config.model.runner != "pooling"
            else hidden_states
        )
        if runner.config.model.dtype == "float32":
            return (ours - plain).abs().max().item(), _FLOAT32_ERROR * max(
                1.0, plain.abs().max().item()
            )
        exact = model.plain(token_ids, exact=True)
        assert exact is not None, "it has given logits before"
        return _size(ours - exact), max(
            _HALF_FACTOR * _size(plain - exact), _HALF_FLOOR * _size(exact)
        )


def _size(x: Tensor) -> float:
    """Root mean square."""
    return x.float().square().mean().sqrt().item()
