"""The processors through the whole engine: preemption, chunked prefill, company, steps in
flight."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import hookimpl

LENGTHS = [5, 17, 40, 3, 33, 1, 21, 9]
MAX_TOKENS = 24
# 30 blocks of 4 tokens do not hold all eight sequences, and a step computes at most 12 tokens: it
# preempts, and prefills in chunks.
TIGHT = {
    "num_kv_blocks": 30,
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 12,
}
PARAMETERS = {
    "xtc": SamplingParams(extra_args={"xtc_probability": 0.5, "xtc_threshold": 0.05}),
    "mirostat": SamplingParams(extra_args={"mirostat_tau": 3.0, "mirostat_eta": 0.5}),
    "dry": SamplingParams(
        temperature=0.0, extra_args={"dry_multiplier": 2.0, "dry_allowed_length": 1}
    ),
    "no_repeat_ngram": SamplingParams(extra_args={"no_repeat_ngram_size": 1}),
    "epsilon_cutoff": SamplingParams(extra_args={"epsilon_cutoff": 0.004}),
    "typical_p": SamplingParams(extra_args={"typical_p": 0.9}),
    "all": SamplingParams(
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        bad_words=["a"],
        logit_bias={40: 2.0},
        allowed_token_ids=list(range(16, 200)),
        top_p=0.95,
        top_k=50,
        min_p=0.001,
        prompt_logprobs=0,
        extra_args={
            "typical_p": 0.95,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.1,
            "mirostat_tau": 4.0,
            "dry_multiplier": 0.5,
        },
    ),
}


class Preemptions:
    """A plugin that counts."""

    name = "preemptions"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += getattr(event, "kind", None) == "preempted"


@pytest.fixture(scope="module")
def counter():
    return Preemptions()


@pytest.fixture(scope="module")
def tight(counter):
    with LLM("tiny", dtype="float32", plugins=[counter], **TIGHT) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


def prompts():
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(16, 250, (n,), generator=generator).tolist() for n in LENGTHS]


def generate(llm, work, params):
    outputs = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
    assert [o.error for o in outputs] == [None] * len(outputs)
    return [[one.token_ids for one in o.outputs] for o in outputs]


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_same_alone_and_preempted_in_company(tight, counter, name):
    """Half of the rows use the parameters, half use none; all get what they get alone."""
    work = prompts()
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    plain = [SamplingParams(temperature=0.9, seed=i, **common) for i in range(len(work))]
    params = [
        PARAMETERS[name].replace(seed=i, **common) if i % 2 else p for i, p in enumerate(plain)
    ]
    before = counter.count
    together = generate(tight, work, params)
    assert counter.count > before, "the pool was meant to be too small"
    alone = [generate(tight, [p], s)[0] for p, s in zip(work, params, strict=True)]
    assert together == alone
    free = [
        generate(tight, [p], s.replace(extra_args=None))[0]
        for p, s in zip(work, params, strict=True)
    ]
    assert free[1::2] != alone[1::2]


def test_n_sequences_each_have_their_mirostat(tight, counter):
    params = SamplingParams(
        n=3,
        seed=5,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        extra_args={"mirostat_tau": 3.0, "mirostat_eta": 0.5},
    )
    work = prompts()[:6]
    before = counter.count
    together = generate(tight, work, [params] * 6)
    assert counter.count > before
    assert together == [generate(tight, [p], params)[0] for p in work]


@pytest.mark.parametrize("name", ["dry", "mirostat"])
def test_the_same_with_steps_in_flight(name):
    params = PARAMETERS[name].replace(seed=11, max_tokens=18, ignore_eos=True)
    found = []
    for overlap in (False, True):
        with LLM(
            "tiny",
            dtype="float32",
            overlap=overlap,
            num_kv_blocks=200,
            block_size=4,
            max_model_len=128,
            max_num_seqs=6,
        ) as llm:
            found.append(generate(llm, prompts(), params))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("extra_args", "message", "param"),
    [
        ({"no_repeat_ngram_size": -1}, "between 0 and 2147483647, not -1", "no_repeat_ngram_size"),
        ({"epsilon_cutoff": 2}, "between 0 and 1", "epsilon_cutoff"),
        ({"typical_p": 0}, "above 0 and at most 1", "typical_p"),
        ({"no_repeat_ngrams": 2}, "Did you mean 'no_repeat_ngram_size'", "no_repeat_ngrams"),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": ["\ud800"]},
            "cannot be tokenized",
            "dry_sequence_breakers",
        ),
        (
            {"dry_sequence_breakers": ["a", 10**6]},
            "token id 1000000 is not in the vocabulary",
            "dry_sequence_breakers",
        ),
    ],
)
def test_wrong_parameters(llm, extra_args, message, param):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("a", SamplingParams(extra_args=extra_args), use_tqdm=False)
    assert error.value.param == param


def test_no_ngram_comes_twice(llm):
    plain = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    params = [plain, plain.replace(extra_args={"no_repeat_ngram_size": 2})]
    free, unique = llm.generate(["a a a a"] * 2, params, use_tqdm=False)

    def repeated(output):
        tokens = output.outputs[0].token_ids
        return len(tokens) - 1 - len(set(pairwise(tokens)))

    assert repeated(free) > 0 and repeated(unique) == 0


def test_a_cutoff_above_all_but_one_is_greedy(llm):
    greedy = SamplingParams(temperature=0, max_tokens=20)
    drawn = SamplingParams(max_tokens=20, seed=1, extra_args={"epsilon_cutoff": 0.999999})
    one, two = llm.generate(["Once upon a time"] * 2, [greedy, drawn], use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


def test_a_search_refuses_them(llm):
    with pytest.raises(RequestError, match="extra_args"):
        SamplingParams(use_beam_search=True, n=2, extra_args={"dry_multiplier": 1.0})
