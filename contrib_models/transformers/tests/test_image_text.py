"""Models of pictures and text without a class of ours: transformers' tokens through the whole
engine, with chunks, preemption and several pictures."""

from __future__ import annotations

import image_text
import pytest
import torch
from given_pictures import FIRST_SPECIAL, Given
from tiny_models import VOCAB_SIZE, save
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm_devkit import assert_same_logits
from toolkit_lm_devkit.generation import logprobs_of
from toolkit_lm_devkit.kv_kind import KVKindConformance
from toolkit_lm_transformers.image_text import TransformersForImageText
from toolkit_lm_transformers.spec import PicturedSpec

KINDS = {
    "aya_vision": "AyaVisionForConditionalGeneration",
    "idefics3": "Idefics3ForConditionalGeneration",
    "molmo2": "Molmo2ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
"""Pictures of one size; tiles on a second axis; patches that are numbered through all pictures of a
prompt; grids of patches with positions of their own."""
TEXT = [5, 9, 31, 60, 7, 12, 80, 4, 44, 17, 23, 61]
OPTIONS = {
    "model_impl": "transformers_image_text",
    "renderer": "given_pictures",
    "plugins": [Given()],
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "block_size": 4,
    "max_logprobs": VOCAB_SIZE,
}
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=8,
    ignore_eos=True,
    logprobs=VOCAB_SIZE,
    allowed_token_ids=list(range(FIRST_SPECIAL)),
)


class TestPictured(KVKindConformance):
    spec = PicturedSpec(block_size=4, widths=(("float32", 1),), token_bytes=4)


def checkpoint(model_type, folder):
    return save(
        model_type,
        folder,
        architecture=KINDS[model_type],
        config=image_text.tiny_config(model_type),
    )


def prompt(token, pictures, length):
    places = [part for number in range(len(pictures)) for part in (token, 4 + number)]
    return {
        "prompt_token_ids": [3, *places, *TEXT[:length]],
        "multi_modal_data": {
            "image": [{name: a.numpy() for name, a in arrays.items()} for arrays in pictures]
        },
    }


@pytest.mark.parametrize("model_type", KINDS)
def test_tokens_are_those_of_transformers(model_type, tmp_path):
    """Of no picture, one and two, the same one twice; the pool is too small for all at a time."""
    model = checkpoint(model_type, tmp_path)
    token = image_text.image_token(model.config.to_dict())
    a, b = (image_text.picture(model, seed) for seed in range(2))
    given = [[], [a], [a, b], [b, b], [b]]
    prompts = [prompt(token, pictures, 12 - 2 * i) for i, pictures in enumerate(given)]
    with LLM(str(tmp_path), num_kv_blocks=16, **OPTIONS) as llm:
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for pictures, output in zip(given, outputs, strict=True):
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        expected = image_text.logits(model, torch.tensor(tokens), pictures)
        expected = torch.log_softmax(expected[len(output.prompt_token_ids) - 1 : -1], dim=-1)
        assert_same_logits(logprobs_of(completion, VOCAB_SIZE), expected)


def test_a_picture_changes_tokens_and_no_prefix_is_taken_from_another(tmp_path):
    model = checkpoint("aya_vision", tmp_path)
    token = image_text.image_token(model.config.to_dict())
    prompts = [prompt(token, [image_text.picture(model, seed)], 12) for seed in (0, 1, 0)]
    with LLM(str(tmp_path), num_kv_blocks=64, **OPTIONS) as llm:
        (a,), (b,), (again,) = (llm.generate([p], PARAMS, use_tqdm=False) for p in prompts)
    first, second, third = (logprobs_of(o.outputs[0], VOCAB_SIZE)[0] for o in (a, b, again))
    assert again.num_cached_tokens == 0
    assert torch.equal(first, third)
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize(
    ("model_type", "change", "reason"),
    [
        ("aya_vision", {"architectures": ["ViTModel"]}, "is not a model of pictures and text"),
        ("kosmos-2.5", {}, "names no token of pictures"),
        ("mllama", {}, "its cross attention"),
        (
            "blip-2",
            {"architectures": ["Blip2ForConditionalGeneration"]},
            "it reads no text without pixel_values",
        ),
    ],
)
def test_refusals(model_type, change, reason):
    config = image_text.tiny_config(model_type)
    name = type(config).__name__.replace("Config", "ForConditionalGeneration")
    values = {**config.to_dict(), "architectures": [name], **change}
    assert reason in TransformersForImageText.refuses(VllmConfig.default(values))


def test_a_picture_of_other_arrays_is_refused(tmp_path):
    model = checkpoint("aya_vision", tmp_path)
    token = image_text.image_token(model.config.to_dict())
    picture = image_text.picture(model)
    bad = {**picture, "input_ids": torch.tensor([5, 6])}
    with LLM(str(tmp_path), num_kv_blocks=16, **OPTIONS) as llm:
        with pytest.raises(ToolkitError, match="an image must have input_ids"):
            llm.generate([prompt(token, [bad], 5)], PARAMS, use_tqdm=False)
        assert llm.generate([prompt(token, [picture], 5)], PARAMS, use_tqdm=False)[0].outputs
