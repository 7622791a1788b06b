"""Poolers of tokens, steps and classes; several tasks in one batch."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.messages import NewSequence, ScheduledSequence, SequenceInputs, StepPlan, StepResult
from toolkit_lm.params import SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_poolers import (
    METHODS,
    PoolingMetadata,
    PoolingRow,
    classification_pooler,
    embedding_pooler,
    token_classification_pooler,
)
from torch import nn

SIZE = 8
LABELS = 5
TAG = 77


def config(**options):
    return VllmConfig.default({"hidden_size": SIZE, "num_labels": LABELS}, **options)


def linear(labels: int = LABELS) -> nn.Linear:
    torch.manual_seed(labels)
    return nn.Linear(SIZE, labels)


def some_prompts(count: int = 7):
    torch.manual_seed(count)
    lengths = [1, 2, 9, 30, 4, 17, 5][:count]
    return [torch.randn(length, SIZE) for length in lengths]


def some_cuts(prompts, seed: int):
    draw = random.Random(seed)
    return [
        sorted(draw.sample(range(1, len(p)), min(len(p) - 1, draw.randint(0, 3)))) for p in prompts
    ]


def some_ids(prompts):
    draw = np.random.default_rng(0)
    return [draw.choice([3, 4, TAG], len(p)).astype(np.int32) for p in prompts]


@torch.inference_mode()
def test_token_embed(run):
    prompts = some_prompts()
    pooler = embedding_pooler(config(), normalize=False)
    for prompt, result in zip(
        prompts, run(pooler, prompts, PoolingParams(task="token_embed")), strict=True
    ):
        assert torch.equal(prompt, result)
    for prompt, result in zip(
        prompts,
        run(pooler, prompts, PoolingParams(task="token_embed", normalize=True, dimensions=3)),
        strict=True,
    ):
        torch.testing.assert_close(result, prompt[:, :3] / prompt[:, :3].norm(dim=1, keepdim=True))


@torch.inference_mode()
def test_classify(run):
    prompts = some_prompts()
    classifier = linear()
    pooler = classification_pooler(config(), classifier, "MEAN")
    classes = run(pooler, prompts, PoolingParams(task="classify"))
    logits = run(pooler, prompts, PoolingParams(task="classify", use_activation=False))
    for prompt, probabilities, raw in zip(prompts, classes, logits, strict=True):
        expected = classifier(prompt.mean(0))
        torch.testing.assert_close(raw, expected)
        torch.testing.assert_close(probabilities, expected.softmax(-1))
    assert pooler.supported_tasks() == {"classify", "token_classify"}


@torch.inference_mode()
def test_one_label_is_a_score(run):
    prompts = some_prompts()
    classifier = linear(1)
    pooler = classification_pooler(config(), classifier, "LAST", num_labels=1)
    assert pooler.supported_tasks() == {"classify", "score", "token_classify"}
    for prompt, score in zip(
        prompts, run(pooler, prompts, PoolingParams(task="score")), strict=True
    ):
        torch.testing.assert_close(score, classifier(prompt[-1]).sigmoid())
        assert score.shape == (1,)


@torch.inference_mode()
def test_a_classifier_of_low_precision_runs_in_float32(run):
    prompts = [prompt.bfloat16() for prompt in some_prompts()]
    classifier = linear().bfloat16()
    pooler = classification_pooler(config(), classifier, "MEAN")
    assert classifier.weight.dtype == torch.float32
    (result, *_) = run(pooler, prompts[2:], PoolingParams(task="classify", use_activation=False))
    torch.testing.assert_close(result, classifier(prompts[2].float().mean(0)))


@torch.inference_mode()
def test_logits_are_shifted_and_scaled(run):
    prompts = some_prompts()
    classifier = linear(1)
    options = config(logit_mean=0.5, logit_sigma=2.0)
    pooler = classification_pooler(options, classifier, "CLS", num_labels=1, temperature=0.25)
    for prompt, score in zip(
        prompts, run(pooler, prompts, PoolingParams(task="score")), strict=True
    ):
        torch.testing.assert_close(score, ((classifier(prompt[0]) - 0.5) / 2.0 / 0.25).sigmoid())


@torch.inference_mode()
def test_own_classifier_of_tokens(run):
    prompts = some_prompts()
    classifier = linear()
    own = linear()
    nn.init.normal_(own.weight)
    pooler = classification_pooler(config(), classifier, "CLS", token_classifier=own)
    for prompt, result in zip(
        prompts, run(pooler, prompts, PoolingParams(task="token_classify")), strict=True
    ):
        torch.testing.assert_close(result, own(prompt).softmax(-1))


def test_the_classifier_stays_the_models():
    model = nn.Module()
    classifier = linear()
    model.pooler = classification_pooler(config(), classifier, "CLS")
    model.score = classifier
    assert set(model.state_dict()) == {"score.weight", "score.bias"}


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_tokens_in_chunks(seed, run):
    prompts = some_prompts()
    pooler = token_classification_pooler(config(), linear())
    whole = run(pooler, prompts, PoolingParams(task="token_classify"))
    chunked = run(
        pooler,
        prompts,
        PoolingParams(task="token_classify"),
        cuts=some_cuts(prompts, seed),
        between=1,
    )
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_steps(seed, run):
    prompts = some_prompts()
    ids = some_ids(prompts)
    classifier = linear()
    pooler = token_classification_pooler(
        config(pooling_type="STEP", step_tag_id=TAG, returned_token_ids=[4, 1]), classifier
    )
    params = PoolingParams(task="token_classify")
    results = run(pooler, prompts, params, cuts=some_cuts(prompts, seed), token_ids=ids)
    for prompt, tokens, result in zip(prompts, ids, results, strict=True):
        expected = classifier(prompt[torch.from_numpy(tokens == TAG)])[:, [4, 1]].softmax(-1)
        torch.testing.assert_close(result, expected)


@torch.inference_mode()
def test_a_request_names_its_own_steps(run):
    prompts = some_prompts()
    ids = some_ids(prompts)
    classifier = linear()
    pooler = token_classification_pooler(config(), classifier, "STEP", step_tag_id=TAG)
    asked = [
        PoolingParams(
            task="token_classify", step_tag_id=3, returned_token_ids=[0, 2], use_activation=False
        ),
        PoolingParams(task="token_classify"),
    ]
    results = run(pooler, prompts[2:4], asked, token_ids=ids[2:4])
    torch.testing.assert_close(
        results[0], classifier(prompts[2][torch.from_numpy(ids[2] == 3)])[:, [0, 2]]
    )
    torch.testing.assert_close(
        results[1], classifier(prompts[3][torch.from_numpy(ids[3] == TAG)]).softmax(-1)
    )


@torch.inference_mode()
def test_steps_without_a_tag_are_all_tokens(run):
    (prompt,) = some_prompts(1)
    pooler = token_classification_pooler(config(), linear(), "STEP")
    (result,) = run(pooler, [prompt], PoolingParams(task="token_classify"))
    assert result.shape == (len(prompt), LABELS)


def test_all_tokens_although_the_model_scores_steps(run):
    prompts = some_prompts()
    params = PoolingParams(task="token_classify")
    pooler = token_classification_pooler(
        config(pooling_type="ALL"), linear(), "STEP", step_tag_id=TAG
    )
    results = run(pooler, prompts, params, token_ids=some_ids(prompts))
    assert [len(result) for result in results] == [len(prompt) for prompt in prompts]


def test_returned_ids_are_logits_of_the_model():
    pooler = token_classification_pooler(config(), linear(), "STEP")
    pooler.check(PoolingParams(task="token_classify", returned_token_ids=[LABELS - 1]))
    with pytest.raises(
        RequestError, match=f"has {LABELS}, but the model gives {LABELS} logits"
    ) as caught:
        pooler.check(PoolingParams(task="token_classify", returned_token_ids=[LABELS]))
    assert caught.value.param == "returned_token_ids"
    with pytest.raises(
        ConfigError, match="'returned_token_ids' has 9, but the model gives 5 logits"
    ):
        token_classification_pooler(config(returned_token_ids=[9]), linear())


def test_a_step_tag_is_a_token_of_the_model():
    of_model = VllmConfig.default(
        {"hidden_size": SIZE, "num_labels": LABELS, "vocab_size": TAG},
        step_tag_id=TAG,
        pooling_type="STEP",
    )
    with pytest.raises(
        ConfigError, match=f"'step_tag_id' is {TAG}, but the model's vocabulary has {TAG} tokens"
    ):
        token_classification_pooler(of_model, linear())


def test_returned_ids_are_each_named_once():
    with pytest.raises(
        RequestError, match=r"each token id once, not \[0, 0, 0, 0, 0, 0, \.\.\.\]"
    ) as caught:
        PoolingParams(task="token_classify", returned_token_ids=[0] * 2**18)
    assert caught.value.param == "returned_token_ids"
    with pytest.raises(ConfigError, match="'returned_token_ids' must name each token id once"):
        token_classification_pooler(config(returned_token_ids=[1, 0, 1]), linear())


MIXED = [
    PoolingParams(),
    PoolingParams(task="token_embed"),
    PoolingParams(normalize=False),
    PoolingParams(dimensions=3),
    PoolingParams(task="token_embed", dimensions=2, normalize=False),
    PoolingParams(dimensions=3, normalize=False),
    PoolingParams(),
]


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_mixed_tasks_and_wishes_are_as_separate(seed, run):
    prompts = some_prompts()
    pooler = embedding_pooler(config())
    together = run(pooler, prompts, MIXED, cuts=some_cuts(prompts, seed), between=1)
    for prompt, params, result in zip(prompts, MIXED, together, strict=True):
        (alone,) = run(pooler, [prompt], params)
        torch.testing.assert_close(alone, result)


@torch.inference_mode()
def test_mixed_classes_are_as_separate(run):
    prompts = some_prompts()
    pooler = classification_pooler(config(), linear(1), num_labels=1)
    asked = [
        PoolingParams(task=task, use_activation=use)
        for task in ("classify", "token_classify", "score")
        for use in (None, False)
    ]
    together = run(pooler, prompts[:6], asked, between=1)
    for prompt, params, result in zip(prompts[:6], asked, together, strict=True):
        (alone,) = run(pooler, [prompt], params)
        torch.testing.assert_close(alone, result)


def test_a_task_that_is_not_supported():
    pooler = embedding_pooler(config())
    with pytest.raises(
        RequestError, match=r"Unsupported task: 'score'. Supported: embed, token_embed\."
    ) as caught:
        pooler.check(PoolingParams(task="score"))
    assert caught.value.param == "task"
    row = PoolingRow(
        params=PoolingParams(task="score"),
        tokens=slice(0, 1),
        token_ids=np.zeros(1, np.int32),
        start=0,
        num_prompt_tokens=1,
    )
    with pytest.raises(AssertionError, match="not refused before"):
        pooler(torch.ones(1, SIZE), PoolingMetadata([row]))


@pytest.mark.parametrize(
    ("pooler", "params"),
    [
        (embedding_pooler(config()), PoolingParams(use_activation=True)),
        (embedding_pooler(config()), PoolingParams(task="token_embed", step_tag_id=3)),
        (classification_pooler(config(), linear()), PoolingParams(task="classify", dimensions=2)),
        (
            classification_pooler(config(), linear()),
            PoolingParams(task="classify", normalize=False),
        ),
        (
            classification_pooler(config(), linear()),
            PoolingParams(task="classify", returned_token_ids=[0]),
        ),
        (
            token_classification_pooler(config(), linear()),
            PoolingParams(task="token_classify", normalize=True),
        ),
    ],
)
def test_parameters_of_other_tasks_are_refused(pooler, params):
    (name,) = [name for name in params.__struct_fields__[1:] if getattr(params, name) is not None]
    with pytest.raises(RequestError, match=name) as caught:
        pooler.check(params)
    assert caught.value.param == name


def test_no_rows():
    assert embedding_pooler(config())(torch.ones(3, SIZE), PoolingMetadata([])) == []


def test_dimensions_are_checked():
    pooler = embedding_pooler(config())
    pooler.check(PoolingParams(dimensions=SIZE))
    for task in ("embed", "token_embed"):
        with pytest.raises(
            RequestError, match=rf"dimensions is 9, but the model's embeddings have {SIZE}"
        ) as caught:
            pooler.check(PoolingParams(task=task, dimensions=9))
        assert caught.value.param == "dimensions"
    assert pooler.output_size("embed") == SIZE


@torch.inference_mode()
@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_waits_once_for_all_that_it_pools(method, task):
    prompts = some_prompts()

    def pooled(hidden_states):
        options = config()
        state = embedding_pooler(options, method).make_part(
            None, options, hidden_states.device, plugins=None, options=None
        )
        ends = np.cumsum([0, *map(len, prompts)])
        rows = np.arange(len(prompts))
        for seq_id, prompt in enumerate(prompts):
            asked = SequenceInputs(pooling=PoolingParams(task=task))
            tokens = [0] * len(prompt)
            known = {
                "seq_id": seq_id,
                "token_ids": tokens,
                "num_prompt_tokens": len(prompt),
                "block_tables": [],
                "inputs": asked,
            }
            state.add(NewSequence(**known, params=SamplingParams(), seed=0, stop_token_ids=[]))
        histories = SimpleNamespace(tokens=lambda row: np.zeros(len(prompts[row]), np.int32))
        plan = StepPlan(
            scheduled=[
                ScheduledSequence(seq_id, 0, len(prompt), [], False)
                for seq_id, prompt in enumerate(prompts)
            ]
        )
        inputs = SimpleNamespace(
            plan=plan, query_start=ends, starts=np.zeros_like(rows), rows=rows, histories=histories
        )
        result = StepResult(token_ids=[])
        state.finish(inputs, hidden_states, result, None)
        return {seq_id: array.to_numpy().tolist() for seq_id, array in result.pooled.items()}

    expected = pooled(torch.cat(prompts))
    with FakeCuda() as cuda:
        hidden_states = torch.cat(prompts).to("cuda")
        cuda.waits.clear()
        assert pooled(hidden_states) == expected
        assert cuda.waits == ["aten::_to_copy"]
    assert len(expected) == len(prompts)
