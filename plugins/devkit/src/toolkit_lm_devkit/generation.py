"""Runs prompts through the whole engine, and keeps the log probabilities of every token of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from toolkit_lm import LLM
from toolkit_lm.events import Event, RequestEvent
from toolkit_lm.outputs import CompletionOutput
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import hookimpl
from torch import Tensor


class Generated(NamedTuple):
    """What the engine made of some prompts."""

    token_ids: list[list[int]]
    """Per prompt: its greedy output."""
    logprobs: list[Tensor]
    """Per prompt: [output tokens, V]."""
    preemptions: int


class _Preemptions:
    """A plugin that counts."""

    name = "preemption-counter"

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def toolkit_event(self, event: Event) -> None:
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


def generate(folder: Path, prompts: Sequence[Sequence[int]], *, vocab_size: int, max_tokens: int, **options: Any) -> Generated:
    """Completes prompts (token ids) greedily, each by `max_tokens` tokens, all in one batch; `options` are those of VllmConfig."""
    counter = _Preemptions()
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=vocab_size)
    with LLM(str(folder), plugins=[counter], max_logprobs=vocab_size, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return Generated([list(c.token_ids) for c in completions], [_table(c, vocab_size) for c in completions], counter.count)


def _table(completion: CompletionOutput, vocab_size: int) -> Tensor:
    """[output tokens, V]; NaN where the engine gave nothing."""
    table = torch.full((len(completion.token_ids), vocab_size), torch.nan)
    for position, entries in enumerate(completion.logprobs or ()):
        table[position, list(entries)] = torch.tensor([entry.logprob for entry in entries.values()])
    return table
