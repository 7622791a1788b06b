"""The processors against those of transformers, and through the whole engine."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.sampling import ProcessorRow
from toolkit_lm_sampling_extra.epsilon_cutoff import EpsilonCutoff
from toolkit_lm_sampling_extra.no_repeat_ngram import NoRepeatNgram

VOCAB = 11


def apply(processor_class, rows):
    """rows: (arguments, tokens, logits [V]) each -> [R, V]."""
    processor = processor_class(VllmConfig.default(), torch.device("cpu"))
    views = []
    for key, (arguments, tokens, _) in enumerate(rows):
        processor_class.check(arguments)
        processor.add(key, arguments, tokens[:2])
        views.append(ProcessorRow(key, np.array(tokens, np.int32), 2))
    return processor.apply(torch.stack([logits.clone() for _, _, logits in rows]), views)


@pytest.fixture
def random_rows():
    generator = torch.Generator().manual_seed(4)
    tokens = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (2, 3, 9, 40, 200)]
    return [(row, torch.randn(VOCAB, generator=generator) * 3) for row in tokens]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_is_that_of_transformers(random_rows, size):
    from transformers import NoRepeatNGramLogitsProcessor

    ours = apply(NoRepeatNgram, [({"size": size}, tokens, logits) for tokens, logits in random_rows])
    for (tokens, logits), row in zip(random_rows, ours, strict=True):
        theirs = NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), logits[None])
        assert torch.equal(row, theirs[0])


@pytest.mark.parametrize("epsilon", [0.01, 0.2, 0.9])
def test_epsilon_cutoff_is_that_of_transformers(random_rows, epsilon):
    from transformers import EpsilonLogitsWarper

    ours = apply(EpsilonCutoff, [({"epsilon": epsilon}, tokens, logits) for tokens, logits in random_rows])
    for (tokens, logits), row in zip(random_rows, ours, strict=True):
        assert torch.equal(row, EpsilonLogitsWarper(epsilon)(torch.tensor([tokens]), logits[None])[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_repeat_ngram": {}}, "no_repeat_ngram.*needs the argument 'size'"),
        ({"no_repeat_ngram": {"size": 0}}, "at least 1, not 0"),
        ({"no_repeat_ngram": {"n": 2}}, "no argument 'n'"),
        ({"epsilon_cutoff": {"epsilon": 1}}, "below 1"),
        ({"no_repeat_ngrams": {}}, "Did you mean 'no_repeat_ngram'"),
    ],
)
def test_wrong_arguments(llm, arguments, message):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("a", SamplingParams(logits_processors=arguments), use_tqdm=False)
    assert error.value.param == "logits_processors"


@pytest.fixture(scope="module")
def llm():
    with LLM(model="tiny") as llm:
        yield llm


def test_no_ngram_comes_twice(llm):
    plain = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    params = [plain, plain.replace(logits_processors={"no_repeat_ngram": {"size": 2}})]
    free, unique = llm.generate(["a a a a"] * 2, params, use_tqdm=False)

    def repeated(output):
        tokens = output.outputs[0].token_ids
        return len(tokens) - 1 - len(set(pairwise(tokens)))

    assert repeated(free) > 0 and repeated(unique) == 0


def test_a_cutoff_above_all_but_one_is_greedy(llm):
    greedy = SamplingParams(temperature=0, max_tokens=20)
    drawn = SamplingParams(max_tokens=20, seed=1, logits_processors={"epsilon_cutoff": {"epsilon": 0.999999}})
    one, two = llm.generate(["Once upon a time"] * 2, [greedy, drawn], use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
