"""What a request says of drafts: fields, usage, and whose tokens it gets drafts of."""

from __future__ import annotations

import pytest
from msgspec import msgpack
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, DraftRequest, EngineRequest, SequenceInputs
from toolkit_lm_drafters.requests import DraftRequests

TEXT = (
    "Once upon a time there was a cat. The cat said: I am a cat. The cat said: I am a cat. The cat"
)
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "tiny", dtype="float32", drafter="ngram,suffix", draft_budget="all", max_model_len=256
    ) as llm:
        yield llm


def ask(llm, text=TEXT, salt=None, **extra_args):
    """An output, which is that of one without drafts."""
    [output] = llm.generate(
        text, GREEDY.replace(extra_args=extra_args), cache_salt=salt, use_tqdm=False
    )
    assert output.error is None
    return output


def test_a_request_may_do_without_drafts(llm):
    """Or with fewer; its tokens are the same."""
    usual = ask(llm)
    assert usual.metrics.num_accepted_tokens > 5
    counts = usual.metrics.drafters
    assert set(counts) <= {"ngram", "suffix"}
    assert sum(drafted for drafted, _ in counts.values()) == usual.metrics.num_draft_tokens
    assert sum(accepted for _, accepted in counts.values()) == usual.metrics.num_accepted_tokens
    for extra, most in (({"speculative": False}, 0), ({"max_draft_tokens": 0}, 0)):
        output = ask(llm, **extra)
        assert output.metrics.num_draft_tokens == most
        assert output.outputs[0].token_ids == usual.outputs[0].token_ids
    one = ask(llm, max_draft_tokens=1)
    assert one.outputs[0].token_ids == usual.outputs[0].token_ids
    assert 0 < one.metrics.num_draft_tokens < 60
    assert ask(llm, speculative=False, max_draft_tokens=3).metrics.num_draft_tokens == 0


def test_fields_without_a_drafter_have_no_effect():
    with LLM("tiny", dtype="float32") as llm:
        assert ask(llm, speculative=False, max_draft_tokens=3).metrics.num_draft_tokens == 0


@pytest.mark.parametrize(
    ("extra", "message", "param"),
    [
        ({"max_draft_tokens": -1}, "between 0 and 128, not -1", "max_draft_tokens"),
        ({"speculative": "perhaps"}, "speculative", "speculative"),
        ({"max_drafts_tokens": 1}, "Did you mean 'max_draft_tokens'", "max_drafts_tokens"),
    ],
)
def test_wrong_fields(llm, extra, message, param):
    with pytest.raises(RequestError, match=message) as error:
        ask(llm, **extra)
    assert error.value.param == param


def test_a_tenant_gets_no_drafts_of_another(llm):
    """The text comes again: for the same tenant from its first answer, for another as if new."""
    text = "A dog and a bird were friends. One day"

    def accepted(salt):
        return ask(llm, text, salt).metrics.num_accepted_tokens

    first = accepted("one")
    runner = llm.engine.client.core.executor.runner
    runner.parts.by_name["drafter"]._drafters["suffix"].wait()
    again = accepted("one")
    assert again > 2 * max(first, 1) and again > 30
    assert accepted("two") == first
    assert accepted("three") == first


def scope(*keys, chain=("suffix",), **model_arguments):
    config = VllmConfig.default().replace(drafter=list(chain))
    request = EngineRequest(
        request_id="0",
        prompt_token_ids=[1],
        params=GREEDY,
        cache_keys=list(keys),
        inputs=SequenceInputs(model_arguments=model_arguments),
    )
    data, added = DraftRequests(config, options=None).prepare(request, {})
    assert added == []
    return "" if data is None else msgpack.decode(data, type=DraftRequest).scope


def test_a_scope_is_what_separates_cached_prefixes():
    salt = CacheKey(0, 1, "tenant")
    assert scope() == scope(CacheKey(3, 9, "an image")) == ""
    assert scope(salt) == scope(salt, CacheKey(3, 9, "an image")) != ""
    assert (
        len({scope(), scope(salt), scope(CacheKey(0, 1, "other")), scope(salt, lora={"a": 1})}) == 4
    )
    assert scope(salt, drafter={"max_draft_tokens": 2}) == scope(salt)
    assert scope(salt, chain=["ngram"]) == "", "no other drafter shares outputs"
