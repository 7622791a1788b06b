"""InternVL against transformers, on random checkpoints in float32: without an engine, and through
it."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from given_renderer import Given
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import (
    assert_same_logits,
    assert_same_tokens,
    checkpoint_config,
    load_checkpoint,
    randomize,
    run_ranks,
    write_tokenizer,
)
from toolkit_lm_devkit.generation import Preemptions, logprobs_of
from transformers import (
    AutoImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from vision_checkpoints import drawings
from vision_families import IMAGE, TEXT, TOWER, VOCAB
from vision_harness import encoded, logits_of_prompts, prompt_of

COUNT = 20
MOST = 1e-4
WORDS = [[11, 12, 13, 14, 15, 16, 17], [21, 22], list(range(31, 61))]
OPTIONS = {"device": "cpu", "max_model_len": 128, "num_kv_blocks": 100, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=VOCAB)


def made(kind):
    own = {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False}
    vision = InternVLVisionConfig(
        **TOWER,
        image_size=[28, 28],
        patch_size=[7, 7],
        **(own if kind == "norms" else {"attention_bias": True}),
    )
    text = LlamaConfig(**TEXT) if kind == "norms" else Qwen2Config(**TEXT)
    model = InternVLForConditionalGeneration(
        InternVLConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=IMAGE,
            downsample_ratio=0.25 if kind == "norms" else 0.5,
            tie_word_embeddings=kind == "norms",
        )
    )
    randomize(model)
    return model.eval()


@pytest.fixture(scope="module", params=["biases", "norms"])
def family(request, tmp_path_factory):
    """The model of transformers, its folder, ours, and our rules."""
    theirs = made(request.param)
    folder = tmp_path_factory.mktemp("internvl")
    theirs.save_pretrained(folder)
    return theirs, folder, *ours(folder)


def ours(folder, **options):
    plugins = Plugins.load()
    name = "InternVLForConditionalGeneration"
    model = load_checkpoint(plugins.models.load(name), folder, plugins=plugins, **options)
    return model, plugins.models.load_multimodal(name)(checkpoint_config(folder))


def tiles(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 28, 28, generator=generator)


def prompts_of(rules):
    return [
        prompt_of(rules, WORDS[0], tiles(3), WORDS[1], tiles(1, 1), WORDS[2]),
        prompt_of(rules, tiles(2, 2), WORDS[0]),
        prompt_of(rules, WORDS[2]),
        prompt_of(rules, WORDS[1], tiles(1, 3), tiles(1, 4)),
        prompt_of(rules, WORDS[1], tiles(1, 5), tiles(1, 4)),
    ]


@torch.inference_mode()
def their_logits(theirs, prompt, drawn=()):
    pixels = {"pixel_values": torch.cat(prompt.pictures)} if prompt.pictures else {}
    # Pictures are what their side would read in a drawn placeholder.
    assert IMAGE not in drawn
    ids = torch.tensor([[*prompt.token_ids, *drawn]])
    return theirs(input_ids=ids, **pixels).logits[0].float()


def assert_near(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= MOST * max(1.0, float(expected.abs().max()))


def test_embeddings_of_pictures(family):
    theirs, _, model, _ = family
    pictures = [tiles(3), tiles(1, 1), tiles(2, 2)]
    for one, picture in zip(encoded(model, pictures), pictures, strict=True):
        with torch.inference_mode():
            expected = theirs.get_image_features(picture, return_dict=True).pooler_output
        assert_near(one, expected.flatten(0, 1))


def test_logits_of_prompts(family):
    theirs, _, model, rules = family
    prompts = prompts_of(rules)
    for prompt, logits in zip(prompts, logits_of_prompts(model, prompts), strict=True):
        assert_near(logits, their_logits(theirs, prompt))


def test_two_ranks(family):
    theirs, folder, model, rules = family
    prompt = prompts_of(rules)[0]

    def compute(rank):
        part = load_checkpoint(
            type(model), folder, rank=rank, plugins=Plugins.load(), tensor_parallel_size=2
        )
        return logits_of_prompts(part, [prompt])[0]

    for found in run_ranks(compute, 2):
        assert_near(found, their_logits(theirs, prompt))


def test_bfloat16_error_is_that_of_transformers(tmp_path):
    half = made("biases").to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    model, rules = ours(tmp_path, dtype="bfloat16")
    prompts = [prompt for prompt in prompts_of(rules) if prompt.pictures]
    errors = []
    for prompt, found in zip(prompts, logits_of_prompts(model, prompts), strict=True):
        exact = their_logits(copy.deepcopy(half).float(), prompt)
        errors.append(
            [(one - exact).abs().mean() for one in (found.float(), their_logits(half, prompt))]
        )
    mine, other = torch.tensor(errors).mean(0)
    assert 0 < mine <= 1.2 * other


def given(prompt):
    features = [
        MultiModalFeatureSpec(
            modality="image",
            mm_identifier=str(float(picture.sum())),
            mm_position=PlaceholderRange(offset=place.start, length=place.stop - place.start),
            data={"pixel_values": Array.of(picture.numpy())},
        )
        for picture, place in zip(prompt.pictures, prompt.places, strict=True)
    ]
    return {"prompt_token_ids": prompt.token_ids} | (
        {"multi_modal_data": {"features": features}} if features else {}
    )


WAYS = {
    "chunked, and from the prefix cache": {"max_num_batched_tokens": 13},
    "preempted": {
        "num_kv_blocks": 24,
        "block_size": 4,
        "max_model_len": 96,
        "max_num_batched_tokens": 16,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens(family, way):
    """Two prompts differ in nothing but a picture."""
    theirs, folder, _, rules = family
    prompts = prompts_of(rules)
    counter = Preemptions()
    with LLM(
        str(folder),
        plugins=[Given(), counter],
        renderer="given",
        max_logprobs=VOCAB,
        **{**OPTIONS, **WAYS[way]},
    ) as llm:
        for _ in range(2):
            outputs = llm.generate([given(prompt) for prompt in prompts], GREEDY, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                [completion] = output.outputs
                drawn = list(completion.token_ids)
                reference = their_logits(theirs, prompt, drawn)[len(prompt.token_ids) - 1 : -1]
                assert_same_logits(logprobs_of(completion, VOCAB), reference.log_softmax(-1))
                assert_same_tokens(drawn, reference)
    assert (counter.count > 0) == (way == "preempted")


MARKS = {"<img>": 5, "</img>": 6, "<IMG_CONTEXT>": IMAGE}
PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": {"height": 28, "width": 28},
    "crop_to_patches": True,
    "min_patches": 1,
    "max_patches": 4,
}


def test_pictures_are_cut_as_transformers_does(family):
    """Tokens of the prompt, and the tokens drawn, are those of transformers' processor and
    model."""
    theirs, folder, _, rules = family
    write_tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    special = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**special, "id": number, "content": mark} for mark, number in MARKS.items()
    ]
    tokenizer["model"]["vocab"] |= MARKS
    path.write_text(json.dumps(tokenizer))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    read = PreTrainedTokenizerFast(tokenizer_file=str(path))
    drawn = drawings(3, seed=3)
    inputs = images(drawn, return_tensors="pt", input_data_format="channels_last")
    counts = inputs["num_patches"].tolist()
    assert max(counts) > 1
    text = "See {} and {}{}."
    marked = [f"<img>{'<IMG_CONTEXT>' * count * rules.num_tokens}</img>" for count in counts]
    ids = read(text.format(*marked), return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = theirs.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=inputs["pixel_values"],
        do_sample=False,
        max_new_tokens=COUNT,
        eos_token_id=None,
        pad_token_id=2,
    )
    prompt = {
        "prompt": text.format(*["<IMG_CONTEXT>"] * 3),
        "multi_modal_data": {"image": drawn},
    }
    with LLM(str(folder), **OPTIONS) as llm:
        [output] = llm.generate([prompt], GREEDY.replace(logprobs=None), use_tqdm=False)
    assert output.prompt_token_ids == ids[0].tolist()
    assert list(output.outputs[0].token_ids) == expected[0, ids.shape[1] :].tolist()


BAD = {
    "nothing": ({}, "must have pixel_values"),
    "something else": ({"pixel_values": tiles(1).numpy(), "other": np.ones(1)}, "must have"),
    "no tile": ({"pixel_values": tiles(0).numpy()}, "floats of shape"),
    "another size": ({"pixel_values": np.zeros((1, 3, 21, 28), np.float32)}, "floats of shape"),
    "integers": ({"pixel_values": np.zeros((1, 3, 28, 28), np.int64)}, "floats of shape"),
    "infinity": ({"pixel_values": np.full((1, 3, 28, 28), np.inf, np.float32)}, "finite"),
    "another count": (
        {"pixel_values": tiles(2).numpy(), "num_patches": np.array([3])},
        r"must be \[2\]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_tower_does_not_take_is_refused(family, name):
    data, reason = BAD[name]
    with pytest.raises(RequestError, match=reason):
        family[3].replacement("image", data)
