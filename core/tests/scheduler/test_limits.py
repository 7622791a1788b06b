"""RequestLimits: what a front refuses, and how many tokens it leaves to the others."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fake_engine import kv_cache
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.messages import EngineRequest, PoolingRules, SequenceInputs
from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing import RequestLimits

RULES = {
    "embed": PoolingRules(chunkable=True, reads_prefix_cache=True, size=4),
    "classify": PoolingRules(chunkable=False, reads_prefix_cache=False, size=2),
}


@dataclass
class Limits:
    """16 tokens of context, 3 sequences, 12 tokens in a step, 8 blocks of 4 tokens."""

    num_blocks: int = 8
    runner: str = "generate"

    def check(self, num_tokens: int, task: str | None = None, start: int = 0, **params) -> int:
        config = VllmConfig.default(
            max_model_len=16, max_num_seqs=3, max_num_batched_tokens=12, runner=self.runner
        )
        limits = RequestLimits(config, kv_cache(self.num_blocks, [(4, None)]), RULES)
        pooling = None if task is None else PoolingParams(task=task)
        return limits.check(
            EngineRequest(
                request_id="r",
                prompt_token_ids=[1] * num_tokens,
                params=SamplingParams(**params),
                inputs=SequenceInputs(pooling=pooling, pooling_start=start),
            )
        )


@pytest.mark.parametrize(
    ("num_tokens", "asked", "given"), [(5, 3, 3), (5, None, 11), (5, 99, 11), (15, 99, 1)]
)
def test_what_is_asked_or_what_the_context_leaves_room_for(num_tokens, asked, given):
    assert Limits().check(num_tokens, max_tokens=asked) == given


@pytest.mark.parametrize("num_tokens", [16, 40])
def test_a_prompt_without_room_for_output(num_tokens):
    with pytest.raises(ContextLengthError) as caught:
        Limits().check(num_tokens)
    wanted = (
        "this model's maximum context length is 16 tokens (max_model_len), output included. "
        "Please reduce the length of the input prompt."
    )
    assert str(caught.value) == f"the prompt has {num_tokens} tokens; {wanted}"
    assert caught.value.param == "prompt"


REFUSED = {
    "empty": ({"num_tokens": 0}, "prompt", "empty"),
    "min_tokens": (
        {"num_tokens": 10, "min_tokens": 7, "max_tokens": None},
        "min_tokens",
        "room for 6",
    ),
    "n": ({"num_tokens": 1, "n": 4}, "n", "at most 3 sequences"),
    "best_of": ({"num_tokens": 1, "best_of": 4}, "best_of", "at most 3 sequences"),
    "beam_width": (
        {"num_tokens": 1, "use_beam_search": True, "beam_width": 4},
        "beam_width",
        "at most 3 sequences",
    ),
    "blocks": (
        {"num_tokens": 3, "n": 3, "max_tokens": 12},
        "n",
        "12 KV cache blocks, but there are 8",
    ),
    "unknown task": ({"num_tokens": 3, "task": "score"}, "task", "Supported: embed, classify"),
    "nothing left to pool": (
        {"num_tokens": 3, "task": "embed", "start": 3},
        "prompt",
        "none of the 3 tokens",
    ),
    "no chunks": (
        {"num_tokens": 13, "task": "classify"},
        "prompt",
        "takes 12 .*truncate_prompt_tokens",
    ),
}


@pytest.mark.parametrize(("arguments", "param", "message"), REFUSED.values(), ids=REFUSED)
def test_what_could_never_be_served(arguments, param, message):
    with pytest.raises(RequestError, match=message) as caught:
        Limits().check(**arguments)
    assert caught.value.param == param


def test_one_sequence_that_does_not_fit_the_cache():
    assert Limits(num_blocks=4).check(5, max_tokens=11) == 11
    with pytest.raises(RequestError, match="lower n or max_tokens") as caught:
        Limits(num_blocks=3).check(5, max_tokens=11)
    assert caught.value.param == "max_tokens"


def test_pooling_draws_nothing_and_may_fill_the_context():
    assert Limits().check(16, task="embed") == 0
    with pytest.raises(
        ContextLengthError,
        match=r"17 tokens; .* maximum context length is 16 tokens .*truncate_prompt_tokens",
    ):
        Limits().check(17, task="embed")


def test_a_model_that_only_pools():
    assert Limits(runner="pooling").check(3, task="embed") == 0
    with pytest.raises(RequestError, match=r"generates no text\. Supported: embed, classify"):
        Limits(runner="pooling").check(3)
