"""Sampling parameters through the whole engine: preemption, chunked prefill, company, words, prompt
log probabilities."""

from __future__ import annotations

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
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bad_words": {"bad_words": ["a", "bc", "!"]},
    "logit_bias": {"logit_bias": {40: 2.0, 41: -50.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(16, 60))},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "bad_words": ["a"],
        "logit_bias": {40: 2.0},
        "allowed_token_ids": list(range(16, 200)),
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.001,
        "prompt_logprobs": 0,
    },
}


class Preemptions:
    """A plugin that counts."""

    name = "preemptions"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += getattr(event, "kind", None) == "preempted"


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(16, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def llama(make_llama):
    return make_llama("sampling")


@pytest.fixture(scope="module")
def counter():
    return Preemptions()


@pytest.fixture(scope="module")
def llm(llama, counter):
    with LLM(str(llama[0]), plugins=[counter], **TIGHT) as llm:
        yield llm


@pytest.fixture(scope="module")
def work(llama):
    return prompts(llama[1].config.vocab_size)


def generate(llm, work, params):
    outputs = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
    assert [o.error for o in outputs] == [None] * len(outputs)
    return outputs


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_same_alone_and_preempted_in_company(llm, counter, work, name):
    """Half of the rows use the parameters, half use none; all get what they get alone."""
    plain = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True)
        for i in range(len(work))
    ]
    params = [p.replace(**PARAMETERS[name]) if i % 2 else p for i, p in enumerate(plain)]
    before = counter.count
    together = generate(llm, work, params)
    assert counter.count > before, "the pool was meant to be too small"
    alone = [generate(llm, [p], s)[0] for p, s in zip(work, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
    free = [generate(llm, [p], s)[0] for p, s in zip(work, plain, strict=True)]
    assert [o.outputs[0].token_ids for o in free[1::2]] != [
        o.outputs[0].token_ids for o in alone[1::2]
    ]


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_those_of_transformers(llm, llama, counter, work, n, monkeypatch):
    model = llama[1]
    runner = llm.engine.client.core.executor.runner
    rows = []
    compute = runner.model.compute_logits
    monkeypatch.setattr(
        runner.model,
        "compute_logits",
        lambda hidden: (rows.append(len(hidden)), compute(hidden))[1],
    )
    params = SamplingParams(
        n=n, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, prompt_logprobs=3
    )
    before = counter.count
    outputs = generate(llm, work, params)
    assert counter.count > before
    for prompt, output in zip(work, outputs, strict=True):
        with torch.inference_mode():
            reference = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
        first, *rest = output.prompt_logprobs
        assert first is None and len(rest) == len(prompt) - 1
        for position, entries in enumerate(rest):
            token = prompt[position + 1]
            assert entries[token].decoded_token is not None
            assert (
                entries[token].rank
                == int((reference[position] > reference[position, token]).sum()) + 1
            )
            assert set(reference[position].topk(3).indices.tolist()) <= set(entries)
            for candidate, entry in entries.items():
                assert entry.logprob == pytest.approx(
                    reference[position, candidate].item(), abs=1e-4
                )
    # One row per prompt token but the first, and one per draw: none of them twice, for all the
    # preemptions.
    assert sum(rows) == sum(len(p) - 1 for p in work) + n * MAX_TOKENS * len(work)


def test_logprobs_of_named_tokens(llm, work):
    """Equal to those of the whole vocabulary, beside a request without."""
    named = [9, 2]
    size = 20
    ask = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
    params = [
        SamplingParams(logprob_token_ids=named, **ask),
        SamplingParams(logprobs=size, **ask),
        SamplingParams(**ask),
    ]
    one, every, none = llm.generate([{"prompt_token_ids": work[2]}] * 3, params)
    assert none.outputs[0].logprobs is None
    for token, told, known in zip(
        one.outputs[0].token_ids, one.outputs[0].logprobs, every.outputs[0].logprobs, strict=True
    ):
        assert set(told) == {token, *named}
        for shared in set(told) & set(known):
            assert (
                told[shared].logprob == pytest.approx(known[shared].logprob, abs=1e-4)
                and told[shared].rank == known[shared].rank
            )


@pytest.mark.parametrize("drafter", ["", "ngram"])
def test_logprobs_mode(llama, work, drafter):
    """Logits of transformers in the place of log probabilities, after the temperature for what is
    drawn; of positions of drafts, too."""
    folder, model = llama
    prompt = work[2]
    params = SamplingParams(
        temperature=0.5, seed=1, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=1
    )
    options = {"drafter": drafter} if drafter else {}
    with LLM(str(folder), logprobs_mode="processed_logits", **TIGHT, **options) as llm:
        (output,) = generate(llm, [prompt], params)
    tokens = output.outputs[0].token_ids
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].float()
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, entries in enumerate(found):
        expected = logits[position] / (1.0 if position < len(prompt) - 1 else 0.5)
        for token, entry in entries.items():
            assert entry.logprob == pytest.approx(expected[token].item(), abs=1e-4)


def test_prompt_logprobs_stream_with_the_chunks(llm, work):
    llm.engine.add_request(
        "chunks", {"prompt_token_ids": work[2]}, SamplingParams(max_tokens=1, prompt_logprobs=0)
    )
    lengths = []
    while llm.engine.has_unfinished_requests():
        lengths += [len(output.prompt_logprobs) for output in llm.engine.step()]
    assert lengths == [13, 25, 37, 40]


def test_bad_words_are_texts(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    text = llm.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    word = next(
        text[i : i + 2]
        for i in range(len(text))
        if text[i : i + 2].isascii() and text[i : i + 2].strip() and i > 4
    )
    other = llm.generate("abc", params.replace(bad_words=[word]), use_tqdm=False)[0].outputs[0].text
    assert (
        word in text
        and word not in other
        and other[: text.index(word) + 1] == text[: text.index(word) + 1]
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {272: 1.0}}, "token id 272 is not in the vocabulary"),
        ({"allowed_token_ids": [5, 300]}, "token id 300 is not in the vocabulary"),
        ({"prompt_logprobs": 21}, "at most 20"),
        ({"logprob_token_ids": list(range(21))}, "at most 20"),
        ({"logprob_token_ids": [10**6]}, "not in the vocabulary"),
        ({"bad_words": ["\ud800"]}, "bad_words: .* cannot be tokenized"),
    ],
)
def test_what_the_model_does_not_have_is_refused(llm, fields, message):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("a", SamplingParams(**fields), use_tqdm=False)
    assert error.value.param == next(iter(fields))


def test_a_request_whose_parameters_leave_no_token_fails_alone(llm):
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True),
        SamplingParams(allowed_token_ids=[1], min_tokens=2, max_tokens=3),
    ]
    good, bad = llm.generate(["a", "b"], params, use_tqdm=False)
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error" and "leave no token" in bad.error


@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_is_scored_without_a_token(llm, work, n):
    """The logprobs are those of a request with a token, and the prompt may fill the context."""
    scored = SamplingParams(max_tokens=0, n=n, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    most = llm.engine.config.max_model_len
    prompts = [
        *({"prompt_token_ids": one} for one in work[:3]),
        {"prompt_token_ids": (work[0] * most)[:most]},
    ]
    found = llm.generate(prompts, scored, use_tqdm=False)
    usual = llm.generate(prompts[:3], scored.replace(max_tokens=1), use_tqdm=False)
    for one, other in zip(found, usual, strict=False):
        assert one.prompt_logprobs == other.prompt_logprobs
    for one, prompt in zip(found, prompts, strict=True):
        assert len(one.prompt_logprobs) == len(prompt["prompt_token_ids"])
        assert [
            (part.text, part.token_ids, part.logprobs, part.finish_reason) for part in one.outputs
        ] == [("", [], [], "length")] * n


def test_no_token_and_no_score_is_refused():
    with pytest.raises(
        RequestError, match="max_tokens must be at least 1, or 0 with prompt_logprobs"
    ):
        SamplingParams(max_tokens=0)
