"""Runs prompts through the whole engine, and keeps all that it can give: the log probabilities of
every token, or all hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from toolkit_lm import LLM, PoolingParams
from toolkit_lm.events import Event, RequestEvent
from toolkit_lm.outputs import CompletionOutput
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import hookimpl
from toolkit_lm.prompts import TokensPrompt
from torch import Tensor


class Generated(NamedTuple):
    """Output of the engine for some prompts."""

    token_ids: list[list[int]]
    """Per prompt: its greedy output."""
    logprobs: list[Tensor]
    """Per prompt: [output tokens, V]."""
    preemptions: int
    num_cached: Sequence[int] = ()
    """Per prompt: its tokens that were found in the cache."""


class Pooled(NamedTuple):
    """Output of a pooling engine for some prompts."""

    hidden_states: list[Tensor]
    """Per prompt: [tokens, H]."""
    embeddings: list[Tensor]
    """Per prompt: [H], the last token's, of unit length."""


class Preemptions:
    """A plugin that counts."""

    name = "preemption-counter"

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def toolkit_event(self, event: Event) -> None:
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


def generate(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_tokens: int,
    plugins: Sequence[object] = (),
    **options: Any,
) -> Generated:
    """Completes prompts (token ids) greedily, each by `max_tokens` tokens, all in one batch.

    `plugins` are from code; `options` are those of VllmConfig.
    """
    counter = Preemptions()
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=vocab_size
    )
    with LLM(str(folder), plugins=[counter, *plugins], max_logprobs=vocab_size, **options) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False
        )
    completions = [output.outputs[0] for output in outputs]
    return Generated(
        [list(c.token_ids) for c in completions],
        [logprobs_of(c, vocab_size) for c in completions],
        counter.count,
        [output.num_cached_tokens or 0 for output in outputs],
    )


def pool(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    *,
    plugins: Sequence[object] = (),
    **options: Any,
) -> Pooled:
    """Embeds prompts (token ids), each by its last token and by all, in one batch of an engine
    without a KV cache.

    `plugins` are from code; `options` are those of VllmConfig.
    """
    wishes = [
        PoolingParams(task="token_embed", normalize=False),
        PoolingParams(task="embed", normalize=True),
    ]
    repeated: list[TokensPrompt] = [
        {"prompt_token_ids": list(prompt)} for prompt in prompts for _ in wishes
    ]
    cacheless = {
        "pooling_type": "LAST",
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
    }
    with LLM(str(folder), plugins=list(plugins), convert="embed", **options | cacheless) as llm:
        outputs = llm.encode(repeated, wishes * len(prompts), use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(repeated)
    found = [torch.tensor(output.outputs.data) for output in outputs]
    return Pooled(found[::2], found[1::2])


def logprobs_of(completion: CompletionOutput, vocab_size: int) -> Tensor:
    """[output tokens, V]; NaN where the engine gave nothing."""
    table = torch.full((len(completion.token_ids), vocab_size), torch.nan)
    for position, entries in enumerate(completion.logprobs or ()):
        table[position, list(entries)] = torch.tensor([entry.logprob for entry in entries.values()])
    return table
