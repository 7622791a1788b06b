"""Models with tiles or rows of tokens against transformers, on random checkpoints in float32."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tile_checkpoints import FAMILIES, random_tiled
from toolkit_lm.errors import CheckpointError, RequestError, ToolkitError
from toolkit_lm.model import Absent
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import assert_bf16_error, checkpoint_config, load_checkpoint, run_ranks
from vision_families import IMAGE
from vision_harness import Prompt, logits_of_prompts

MOST = 1e-4
TEXT = [[11, 12, 13, 14, 15, 16, 17], [21, 22], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, plugins):
    """The model of transformers, its folder, ours, and our rules."""
    theirs = random_tiled(request.param)
    folder = tmp_path_factory.mktemp("tiled")
    theirs.save_pretrained(folder)
    return theirs, folder, *ours(folder, plugins)


def ours(folder, plugins, **options):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = load_checkpoint(plugins.models.load(architecture), folder, plugins=plugins, **options)
    return model, plugins.models.load_multimodal(architecture)(checkpoint_config(folder))


def is_tiled(theirs):
    return hasattr(theirs.config, "scale_factor")


def picture(theirs, rows, columns, seed):
    """Pixels of rows x columns tiles, or of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    if is_tiled(theirs):
        return torch.randn(1, rows * columns + 1, 3, 28, 28, generator=generator)
    side = 7 * getattr(theirs.config, "spatial_merge_size", 1)
    return torch.randn(1, 3, rows * side, columns * side, generator=generator)


def prompt_of(theirs, rules, *parts):
    """Prompt of tokens and pictures, whose tokens are given with them: as many as features."""
    prompt = Prompt([], [], [], [])
    for part in parts:
        tokens = part
        if isinstance(part, torch.Tensor):
            side = 7 * getattr(theirs.config, "spatial_merge_size", 1)
            count = (
                part.shape[1] * rules.num_tokens
                if is_tiled(theirs)
                else part.shape[2] * part.shape[3] // side**2
            )
            data = {"pixel_values": part.numpy(), "input_ids": np.array([8, *[IMAGE] * count, 9])}
            tokens = rules.replacement("image", data).token_ids
            prompt.pictures.append(part)
        prompt.token_ids.extend(tokens)
        prompt.is_picture.extend(token == IMAGE for token in tokens)
    return prompt


def prompts_of(theirs, rules):
    a, b, c = (picture(theirs, *shape, seed) for seed, shape in enumerate([(1, 2), (2, 2), (3, 1)]))
    return [
        prompt_of(theirs, rules, TEXT[0], a, TEXT[1], b, TEXT[2]),
        prompt_of(theirs, rules, c, TEXT[0]),
        prompt_of(theirs, rules, TEXT[2]),
        prompt_of(theirs, rules, b),
    ]


@torch.inference_mode()
def their_logits(theirs, prompt):
    inputs = {"input_ids": torch.tensor([prompt.token_ids])}
    if prompt.pictures and is_tiled(theirs):
        inputs["pixel_values"] = torch.cat(prompt.pictures, dim=1)
    elif prompt.pictures:
        sizes = [one.shape[2:] for one in prompt.pictures]
        height, width = (max(size[i] for size in sizes) for i in range(2))
        inputs["image_sizes"] = torch.tensor([list(size) for size in sizes])
        inputs["pixel_values"] = torch.cat(
            [
                torch.nn.functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2]))
                for one in prompt.pictures
            ]
        )
    return theirs(**inputs).logits[0].float()


def assert_near(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= MOST * max(1.0, float(expected.abs().max()))


def test_logits_of_prompts(family):
    theirs, _, model, rules = family
    prompts = prompts_of(theirs, rules)
    for prompt, logits in zip(prompts, logits_of_prompts(model, prompts), strict=True):
        assert_near(logits, their_logits(theirs, prompt))


def test_two_ranks(family, plugins):
    theirs, folder, model, rules = family
    prompt = prompts_of(theirs, rules)[0]

    def compute(rank):
        part = load_checkpoint(
            type(model), folder, rank=rank, plugins=plugins, tensor_parallel_size=2
        )
        return logits_of_prompts(part, [prompt])[0]

    for found in run_ranks(compute, 2):
        assert_near(found, their_logits(theirs, prompt))


def test_two_stages(family, plugins):
    theirs, folder, model, rules = family
    prompts = prompts_of(theirs, rules)
    first, last = (
        load_checkpoint(type(model), folder, rank=rank, plugins=plugins, pipeline_parallel_size=2)
        for rank in range(2)
    )
    assert isinstance(last.encoder, Absent)
    for one, other in zip(
        logits_of_prompts(first, prompts, last), logits_of_prompts(model, prompts), strict=True
    ):
        assert torch.equal(one, other)


def test_bfloat16(family, plugins):
    theirs, folder, _, _ = family
    model, rules = ours(folder, plugins, dtype="bfloat16")
    prompts = prompts_of(theirs, rules)[:2]
    exact = [their_logits(theirs, prompt) for prompt in prompts]
    half = type(theirs).from_pretrained(folder, dtype=torch.bfloat16).eval()
    rounded = [
        prompt._replace(pictures=[one.bfloat16() for one in prompt.pictures]) for prompt in prompts
    ]
    found = logits_of_prompts(model, prompts)
    assert_bf16_error(found, [their_logits(half, prompt) for prompt in rounded], exact)


PIXELS = np.zeros((1, 1, 3, 28, 28), np.float32)
ROWS = np.zeros((1, 3, 14, 28), np.float32)
BAD = [
    ("idefics3", {}, "must have pixel_values or embeds"),
    ("idefics3", {"pixel_values": PIXELS, "other": np.ones(1)}, "must have pixel_values"),
    ("idefics3", {"pixel_values": PIXELS[0]}, "floats of shape"),
    ("idefics3", {"pixel_values": PIXELS.astype(np.int64)}, "floats of shape"),
    ("idefics3", {"pixel_values": PIXELS + np.inf}, "finite"),
    ("idefics3", {"pixel_values": PIXELS}, "has no token '<fake_token_around_image>'"),
    ("idefics3", {"pixel_values": PIXELS, "rows": np.array([1]), "cols": np.array([2])}, "3 tiles"),
    ("idefics3", {"pixel_values": PIXELS, "rows": np.array([1.5])}, "one integer"),
    ("idefics3", {"pixel_values": PIXELS, "rows": np.array([-1])}, "from 0 to"),
    ("idefics3", {"pixel_values": PIXELS, "pixel_attention_mask": np.zeros(1)}, "whole tiles"),
    ("idefics3", {"pixel_values": PIXELS, "input_ids": np.array([IMAGE])}, "4 image tokens, not 1"),
    ("idefics3", {"pixel_values": PIXELS, "input_ids": np.array([300])}, "not in the vocabulary"),
    ("idefics3", {"pixel_values": PIXELS, "input_ids": np.ones((1, 2), int)}, r"integers \[n\]"),
    ("mistral3", {}, "must have pixel_values"),
    ("mistral3", {"embeds": np.zeros((2, 64), np.float32)}, "image_sizes and embeds"),
    ("mistral3", {"pixel_values": ROWS[0]}, "must be multiples of 14"),
    ("mistral3", {"pixel_values": ROWS[:, :, :7]}, "must be multiples of 14"),
    ("mistral3", {"pixel_values": ROWS, "image_sizes": np.array([[28, 28]])}, "of 28 x 28 must be"),
    ("mistral3", {"pixel_values": ROWS, "image_sizes": np.array([28])}, "two integers"),
    ("mistral3", {"pixel_values": ROWS.astype(np.int64)}, "must be floats"),
    ("mistral3", {"pixel_values": ROWS - np.inf}, "finite"),
    (
        "mistral3",
        {"pixel_values": ROWS, "input_ids": np.full(3, IMAGE)},
        "2 image tokens, not 3",
    ),
    (
        "mistral3",
        {
            "embeds": np.zeros((2**18, 64), np.float16),
            "image_sizes": np.array([14 * 2**9, 14 * 2**9]),
        },
        "at most",
    ),
]


@pytest.mark.parametrize(("name", "data", "reason"), BAD)
def test_what_the_tower_does_not_take_is_refused(name, data, reason, plugins, tmp_path):
    theirs = FAMILIES[name]()
    theirs.config.architectures = [type(theirs).__name__]
    theirs.config.save_pretrained(tmp_path)
    rules = plugins.models.load_multimodal(type(theirs).__name__)(checkpoint_config(tmp_path))
    with pytest.raises(RequestError, match=reason):
        rules.replacement("image", data)


CONFIGS = [
    ("idefics3", {"scale_factor": 3}, "4 x 4 patches cannot be merged by 'scale_factor' 3"),
    ("idefics3", {"image_token_id": 300}, "the image token 300 is not in the vocabulary"),
    ("pixtral", {"vision_feature_select_strategy": "default"}, "must be 'full'"),
    ("mistral3", {"vision_feature_layer": [0, -1]}, "must be one layer"),
    ("mistral3", {"spatial_merge_size": 0}, "'spatial_merge_size' must be from 1"),
    ("mistral3", {"vision_config": {"model_type": "radio"}}, "must be of model_type 'pixtral'"),
    (
        "mistral3",
        {"vision_config": {"model_type": "pixtral", "hidden_size": 36, "num_attention_heads": 6}},
        "must be a multiple of 4, not 6",
    ),
]


@pytest.mark.parametrize(("name", "fields", "reason"), CONFIGS)
def test_configs_that_describe_no_model(name, fields, reason, plugins, tmp_path):
    random_tiled(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ToolkitError, match=reason):
        _, rules = ours(tmp_path, plugins)
        rules.placeholder_id("image")


def test_layers_that_give_nothing_are_not_there(plugins, tmp_path):
    theirs = FAMILIES["pixtral"]()
    theirs.config.vision_feature_layer = 1
    theirs.save_pretrained(tmp_path)
    model, _ = ours(tmp_path, plugins)
    assert len(model.encoder.vision_tower.transformer.layers) == 1


def test_a_weight_that_is_missing_is_named(plugins, tmp_path):
    theirs = FAMILIES["smolvlm"]()
    state = theirs.state_dict()
    state.pop("model.connector.modality_projection.proj.weight")
    theirs.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"connector\.modality_projection\.proj"):
        ours(tmp_path, plugins)
