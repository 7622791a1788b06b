"""Rows for the sampler, made of sampling parameters and tokens, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.messages import NewSequence, SamplerState, SequenceInputs
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import ProcessorTable, SamplingBatch, TokenHistory


def sampling_rows(
    *params: SamplingParams,
    prompts: Sequence[list[int]] | None = None,
    outputs: Sequence[list[int]] | None = None,
    seeds: Sequence[int] | None = None,
    stops: Sequence[list[int]] | None = None,
    bad_words: Sequence[list[list[int]]] | None = None,
    processors: ProcessorTable | None = None,
    arguments: Sequence[Mapping[str, dict[str, Any]]] | None = None,
    states: Sequence[SamplerState] | None = None,
    capacity: int = 1,
) -> SamplingBatch:
    """One row for each of `params`; row i is the sequence i. The other arguments are lists, one
    entry per row, but for `processors`.

    `prompts` are [0] and `outputs` [] by default, `seeds` the rows' indices. `arguments`: by logits
    processor, what `prepare` gave; `states`: what `sample` returned with the row's last draw.
    `capacity`: tokens that may be appended to the rows' history.
    """
    num = len(params)
    prompts, outputs = prompts or [[0]] * num, outputs or [[]] * num
    history = TokenHistory(
        num, capacity + max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True))
    )
    rows = SamplingBatch(history, processors)
    for i, request_params in enumerate(params):
        tokens = [*prompts[i], *outputs[i]]
        history.set(i, tokens, len(prompts[i]))
        inputs = SequenceInputs(
            bad_words=bad_words[i] if bad_words else [],
            logits_processors=dict(arguments[i]) if arguments else {},
        )
        seq = NewSequence(
            seq_id=i,
            token_ids=tokens,
            num_prompt_tokens=len(prompts[i]),
            block_tables=[],
            params=request_params,
            seed=seeds[i] if seeds else i,
            stop_token_ids=stops[i] if stops else [],
            inputs=inputs,
            sampler_state=states[i] if states else {},
        )
        rows.set(i, seq)
    return rows
