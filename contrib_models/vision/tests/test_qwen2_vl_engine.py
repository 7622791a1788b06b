"""Qwen2-VL and Qwen2.5-VL through the engine: greedy tokens are those of transformers, however
prompts are computed."""

from __future__ import annotations

import pytest
import torch
from given_renderer import Given
from qwen_harness import (
    VOCAB,
    arguments,
    by_day,
    is_glm,
    picture,
    prompt_of,
    random_qwen,
    reads_videos,
    rules_of,
    timed_video,
    video,
)
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_cpu.fused import FusedDecoderLayer
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.generation import Preemptions, logprobs_of

COUNT = 16
OPTIONS = {
    "device": "cpu",
    "max_model_len": 160,
    "num_kv_blocks": 100,
    "max_num_seqs": 8,
    "renderer": "given",
}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=VOCAB)
TEXT = [[11, 12, 13, 14, 15, 16, 17], [21, 22], list(range(31, 61))]
WAYS = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 13},
    "one token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "uncached": {"enable_prefix_caching": False, "max_num_batched_tokens": 29},
    "by sdpa, in small blocks": {
        "attention_backend": "sdpa",
        "max_num_batched_tokens": 20,
        "block_size": 4,
        "num_kv_blocks": 400,
    },
    "module by module": {"kernels": "torch"},
}


@pytest.fixture(
    scope="module",
    params=by_day(
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "glm4v",
        "glm46v",
        "glm4v_moe",
        "glm_ocr",
    ),
)
def subject(request, tmp_path_factory):
    """A folder, prompts, and the log probabilities of transformers along some tokens after each."""
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("qwen")
    theirs.save_pretrained(folder)
    rules = rules_of(theirs)
    seconds = 1.5 if request.param == "qwen2_5_vl" else None
    prompts = [
        prompt_of(
            rules, TEXT[0], picture(4, 6), TEXT[1], picture(2, 2), TEXT[2], picture(14, 10), TEXT[1]
        ),
        prompt_of(rules, picture(6, 6), TEXT[0]),
        prompt_of(rules, TEXT[2]),
        prompt_of(rules, TEXT[0], picture(4, 6), picture(4, 6, seed=1)),
        prompt_of(rules, TEXT[0], picture(4, 6, seed=2), TEXT[1]),
        prompt_of(rules, TEXT[1]),
    ]
    sizes = (3, 4, 6), (5, 4, 4), (2, 6, 4)
    if not reads_videos(theirs):
        beside = [] if is_glm(theirs) else [picture(2, 2)]
        prompts.append(prompt_of(rules, TEXT[1], timed_video(3, 4, 6), TEXT[0], *beside, TEXT[1]))
    elif reads_videos(theirs):
        clips = [video(*size, seconds) for size in sizes]
        prompts += [
            prompt_of(rules, TEXT[1], clips[0], TEXT[0], picture(2, 2), clips[1], TEXT[2]),
            prompt_of(rules, clips[2]),
        ]
    return theirs, folder, prompts


def given(prompts):
    return [
        {"prompt_token_ids": prompt.token_ids}
        | ({"multi_modal_data": {"features": prompt.features}} if prompt.features else {})
        for prompt in prompts
    ]


@torch.inference_mode()
def their_logprobs(theirs, prompt, drawn):
    """[drawn, V], along `drawn`."""
    theirs.model.rope_deltas = None
    inputs = arguments(prompt)
    inputs["mm_token_type_ids"] = torch.nn.functional.pad(
        inputs["mm_token_type_ids"], (0, len(drawn))
    )
    logits = theirs(input_ids=torch.tensor([prompt.token_ids + drawn]), **inputs).logits[0]
    return logits[len(prompt.token_ids) - 1 : -1].log_softmax(-1)


def assert_theirs(subject, outputs, prompts=None):
    theirs, _, all_prompts = subject
    for prompt, output in zip(prompts or all_prompts, outputs, strict=True):
        [completion] = output.outputs
        drawn = list(completion.token_ids)
        assert len(drawn) == COUNT
        reference = their_logprobs(theirs, prompt, drawn)
        assert_same_logits(logprobs_of(completion, VOCAB), reference)
        assert_same_tokens(drawn, reference)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens(subject, way):
    """All prompts in one batch, and once more, where it may read the prefix cache."""
    _, folder, prompts = subject
    with LLM(str(folder), plugins=[Given()], max_logprobs=VOCAB, **{**OPTIONS, **WAYS[way]}) as llm:
        for _ in range(2):
            assert_theirs(subject, llm.generate(given(prompts), GREEDY, use_tqdm=False))


@torch.inference_mode()
def test_transformers_draws_the_same_itself(subject):
    """Step by step, with its own cache and its own positions of what is drawn."""
    theirs, folder, prompts = subject
    with LLM(str(folder), plugins=[Given()], **OPTIONS) as llm:
        outputs = llm.generate(given(prompts), GREEDY.replace(logprobs=None), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        theirs.model.rope_deltas = None
        ids = torch.tensor([prompt.token_ids])
        drawn = theirs.generate(
            input_ids=ids,
            **arguments(prompt),
            do_sample=False,
            max_new_tokens=COUNT,
            eos_token_id=None,
            pad_token_id=2,
        )
        assert list(output.outputs[0].token_ids) == drawn[0, ids.shape[1] :].tolist()


def test_preempted_sequences_keep_their_positions(subject):
    _, folder, prompts = subject
    counter = Preemptions()
    few = {
        "num_kv_blocks": 55 if len(prompts) > 6 else 45,
        "block_size": 4,
        "max_num_batched_tokens": 16,
    }
    with LLM(
        str(folder), plugins=[Given(), counter], max_logprobs=VOCAB, **{**OPTIONS, **few}
    ) as llm:
        assert_theirs(subject, llm.generate(given(prompts), GREEDY, use_tqdm=False))
    assert counter.count > 0


def test_samples_of_one_prompt(subject):
    """They are forked from one prefill."""
    theirs, folder, prompts = subject
    with LLM(str(folder), plugins=[Given()], max_logprobs=VOCAB, **OPTIONS) as llm:
        [output] = llm.generate(
            given(prompts[:1]), GREEDY.replace(n=3, temperature=0.7, seed=1), use_tqdm=False
        )
    for completion in output.outputs:
        drawn = list(completion.token_ids)
        assert_same_logits(
            logprobs_of(completion, VOCAB), their_logprobs(theirs, prompts[0], drawn)
        )
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_pictures_alike_in_all_but_content_share_no_prefix(subject):
    """Their tokens are the same."""
    theirs, folder, _ = subject
    rules = rules_of(theirs)
    prompts = [prompt_of(rules, TEXT[0], picture(6, 8, seed=seed), TEXT[2]) for seed in range(4)]
    with LLM(str(folder), plugins=[Given()], max_logprobs=VOCAB, **OPTIONS) as llm:
        for prompt in [*prompts, *prompts]:
            assert_theirs(subject, llm.generate(given([prompt]), GREEDY, use_tqdm=False), [prompt])


@pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
def test_layers_in_one_call_take_three_positions(subject, monkeypatch):
    """The kernels of the CPU compute whole layers, with pictures among the tokens as without."""
    _, folder, prompts = subject
    calls = []
    call = FusedDecoderLayer.__call__
    monkeypatch.setattr(
        FusedDecoderLayer,
        "__call__",
        lambda self, *given: calls.append(call(self, *given)) or calls[-1],
    )
    with LLM(str(folder), plugins=[Given()], max_logprobs=VOCAB, **OPTIONS) as llm:
        assert_theirs(subject, llm.generate(given(prompts), GREEDY, use_tqdm=False))
    # Layers of a hybrid are computed by their modules.
    kind = subject[0].config.model_type
    is_hybrid = kind.startswith("qwen3_5")
    assert bool(calls) != is_hybrid
    # GLM-4 turns dimensions that stand side by side, which these kernels leave to modules.
    is_left = kind in ("glm4v", "glm46v", "glm_ocr")
    assert all((done is None) == is_left for done in calls)
