"""Qwen2-VL and Qwen2.5-VL against transformers, on random checkpoints in float32."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from qwen_harness import (
    FAMILIES,
    IMAGE,
    VIDEO,
    VOCAB,
    Item,
    arguments,
    by_day,
    encoded,
    glm4v,
    glm4v_moe,
    glm_ocr,
    is_glm,
    logits_of_prompts,
    picture,
    prompt_of,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    random_qwen,
    reads_videos,
    rules_of,
    timed_video,
    video,
)
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, RequestError, UnsupportedError
from toolkit_lm.model import LinearBase, construction
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import (
    checkpoint_config,
    hidden_states,
    load_checkpoint,
    logits_of,
    randomize,
    run_ranks,
)
from toolkit_lm_vision.qwen2_vl_shape import Grid

MOST = 1e-4
TEXT = [[11, 12, 13, 14, 15, 16, 17], [21, 22], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]
PICTURES = [picture(4, 6), picture(2, 2), picture(14, 10), picture(6, 6), picture(12, 4, seed=1)]


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load()


@pytest.fixture(scope="module", params=by_day(*FAMILIES))
def family(request, tmp_path_factory, plugins):
    """The model of transformers, ours, and our rules."""
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("qwen")
    theirs.save_pretrained(folder)
    return theirs, *ours(folder, plugins)


def ours(folder, plugins, **options):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = load_checkpoint(plugins.models.load(architecture), folder, plugins=plugins, **options)
    return model, plugins.models.load_multimodal(architecture)(checkpoint_config(folder))


def prompts_of(theirs, rules):
    """Pictures of several sizes among text, videos beside them, one picture, and nothing but
    text."""
    seconds = 1.5 if theirs.config.model_type == "qwen2_5_vl" else None
    a, b, c, d, e = PICTURES
    pictures = [
        prompt_of(rules, TEXT[0], a, TEXT[1], b, TEXT[2], c, TEXT[1]),
        prompt_of(rules, d, TEXT[0]),
        prompt_of(rules, TEXT[2]),
        prompt_of(rules, TEXT[0], e, a),
    ]
    if not reads_videos(theirs):
        beside = [] if is_glm(theirs) else [b]
        return [*pictures, prompt_of(rules, TEXT[1], timed_video(3, 4, 6), TEXT[0], *beside)]
    return [
        *pictures,
        prompt_of(
            rules, TEXT[1], video(3, 4, 6, seconds), TEXT[0], b, video(5, 4, 4, seconds), TEXT[2]
        ),
        prompt_of(rules, video(2, 6, 4, seconds)),
    ]


@torch.inference_mode()
def their_features(theirs, items):
    """Features of each item alone, with those of deeper layers behind them."""
    found = []
    for item in items:
        get = theirs.get_image_features if item.modality == "image" else theirs.get_video_features
        out = get(torch.from_numpy(item.pixels), torch.from_numpy(item.grid), return_dict=True)
        deep = [state[0] for state in out.get("deepstack_features") or ()]
        found.append(torch.cat([out.pooler_output[0], *deep], dim=-1))
    return found


def assert_near(found, expected):
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= MOST * max(1.0, float(expected.abs().max()))


def test_embeddings_of_items_of_any_size(family):
    theirs, model, _ = family
    videos = [video(3, 4, 6), video(1, 2, 2), video(2, 14, 6)]
    items = [*PICTURES, *videos]
    found = encoded(model, items)
    for one, other in zip(found, their_features(theirs, items), strict=True):
        assert other.std() > 0.1
        assert_near(one, other)


def test_an_item_does_not_depend_on_those_beside_it(family):
    _, model, _ = family
    together = encoded(model, PICTURES)
    for one, item in zip(together, PICTURES, strict=True):
        torch.testing.assert_close(one, encoded(model, [item])[0], atol=1e-5, rtol=1e-5)


def test_positions(family):
    theirs, model, rules = family
    for prompt in prompts_of(theirs, rules):
        if not prompt.items:
            continue
        given = {
            name: value
            for name, value in arguments(prompt).items()
            if not name.startswith("pixel_values")
        }
        expected, _ = theirs.model.get_rope_index(torch.tensor([prompt.token_ids]), **given)
        found = model.prompt_positions(np.array(prompt.token_ids), prompt.features)
        assert found.dtype == np.int64
        assert found.tolist() == expected[:, 0].tolist()
        assert found.max() < len(prompt.token_ids)


@pytest.mark.parametrize("seconds", [0.0, 0.07, 0.5, 1 / 3, 0.999999, 1.99])
def test_positions_of_frames_by_the_clock(seconds):
    theirs = qwen2_5_vl()
    rules = rules_of(theirs)
    prompt = prompt_of(rules, TEXT[1], video(6, 6, 4, seconds), TEXT[0])
    given = {
        name: value
        for name, value in arguments(prompt).items()
        if not name.startswith("pixel_values")
    }
    expected, _ = theirs.model.get_rope_index(torch.tensor([prompt.token_ids]), **given)
    found = rules.shape.positions(Grid(6, 6, 4), rules.shape.interval(seconds))
    assert (found + 3).tolist() == expected[:, 0, 3 : 3 + found.shape[1]].tolist()


def test_logits_of_prompts(family):
    """All prompts in one flat batch."""
    theirs, model, rules = family
    prompts = prompts_of(theirs, rules)
    for prompt, logits in zip(prompts, logits_of_prompts(model, prompts), strict=True):
        theirs.model.rope_deltas = None
        with torch.inference_mode():
            expected = theirs(
                input_ids=torch.tensor([prompt.token_ids]), **arguments(prompt)
            ).logits[0]
        assert logits.shape == (len(prompt.token_ids), VOCAB)
        assert_near(logits, expected)


def test_text_alone_needs_one_position_of_each_token(family):
    _, model, rules = family
    prompt = prompt_of(rules, TEXT[2])
    [states] = hidden_states([model], [torch.tensor(TEXT[2])])
    with torch.inference_mode():
        assert_near(model.compute_logits(states), logits_of_prompts(model, [prompt])[0])


# Checkpoints


def in_other_words(theirs, folder, *, names="file", config="nested"):
    """The checkpoint as `save_pretrained` writes it; with weights named as in the model; or with
    the config of transformers 4."""
    theirs.save_pretrained(folder)
    if names == "model":
        tied = theirs.config.tie_word_embeddings
        weights = {
            name: tensor
            for name, tensor in theirs.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
        assert all(
            name.startswith(("model.visual.", "model.language_model.", "lm_head."))
            for name in weights
        )
        save_file(weights, folder / "model.safetensors")
    if config == "flat":
        values = json.loads((folder / "config.json").read_text())
        text = values.pop("text_config")
        vision = values.pop("vision_config")
        rope = text.pop("rope_parameters")
        text |= {
            "rope_theta": rope["rope_theta"],
            "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
            "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        }
        vision["in_chans"] = vision.pop("in_channels")
        (folder / "config.json").write_text(json.dumps({**text, **values, "vision_config": vision}))
    return folder


@pytest.mark.parametrize("name", by_day(*FAMILIES))
def test_checkpoints_by_any_names_are_the_same(name, tmp_path, plugins):
    theirs = random_qwen(name)
    model, rules = ours(in_other_words(theirs, tmp_path / "usual"), plugins)
    prompts = prompts_of(theirs, rules)
    expected = logits_of_prompts(model, prompts)
    for words in ({"names": "model"}, {"config": "flat"}, {"names": "model", "config": "flat"}):
        other, other_rules = ours(
            in_other_words(theirs, tmp_path / str(len(words)), **words), plugins
        )
        assert [one.token_ids for one in prompts_of(theirs, other_rules)] == [
            one.token_ids for one in prompts
        ]
        for one, another in zip(logits_of_prompts(other, prompts), expected, strict=True):
            assert torch.equal(one, another)


def test_layers_are_called_as_in_files(family):
    """So that a quantization finds which layers it leaves alone."""
    theirs, model, _ = family
    prefixes = {module.prefix for module in model.modules() if isinstance(module, LinearBase)}
    own = dict(theirs.model.visual.named_modules())
    assert {"model.embed_tokens", "model.layers.1.self_attn.qkv_proj"} <= prefixes
    assert len([prefix for prefix in prefixes if prefix.removeprefix("visual.") in own]) >= 3


def test_weights_that_lack_are_named(family, tmp_path, plugins):
    theirs, loaded, _ = family
    in_other_words(theirs, tmp_path, names="model")
    with construction(models=plugins.models):
        model = type(loaded)(vllm_config=checkpoint_config(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    last = [name for name in weights if name.startswith("model.visual.merger.")][-1]
    for name in (
        last,
        "model.visual.blocks.1.attn.qkv.weight",
        "model.language_model.norm.weight",
    ):
        with pytest.raises(
            CheckpointError, match=re.escape(name.split(".", 2)[2].rpartition(".")[0])
        ):
            model.load_weights(
                [(other, tensor) for other, tensor in weights.items() if other != name]
            )
    with pytest.raises(CheckpointError, match=r"of\.nobody"):
        model.load_weights([*weights.items(), ("of.nobody.weight", torch.zeros(1))])
    model.load_weights(weights.items())


@pytest.mark.parametrize("inner", [32, 64])
def test_experts_whose_tensors_are_square(tmp_path, plugins, inner):
    """Their shapes do not say whether inputs come before outputs: those of others do."""
    theirs = qwen3_vl_moe(moe_intermediate_size=inner)
    randomize(theirs)
    theirs.eval().save_pretrained(tmp_path)
    model, _ = ours(tmp_path, plugins)
    with torch.inference_mode():
        expected = theirs(torch.tensor([TEXT[2]])).logits[0]
    assert_near(logits_of([model], torch.tensor(TEXT[2])), expected)


@pytest.mark.parametrize("make", [qwen2_vl, qwen2_5_vl, qwen3_vl_moe, glm4v, glm4v_moe, glm_ocr])
def test_two_ranks_and_two_stages(make, tmp_path, plugins):
    theirs = make()
    theirs.eval().save_pretrained(tmp_path)
    model, rules = ours(tmp_path, plugins)
    clip = [video(2, 4, 4) if reads_videos(theirs) else timed_video(2, 4, 4)]
    prompt = prompt_of(rules, TEXT[0], PICTURES[0], TEXT[1], *clip, TEXT[2])
    [expected] = logits_of_prompts(model, [prompt])

    def compute(rank):
        part = load_checkpoint(
            type(model), tmp_path, rank=rank, plugins=plugins, tensor_parallel_size=2
        )
        return logits_of_prompts(part, [prompt])[0]

    for found in run_ranks(compute, 2):
        assert_near(found, expected)
    first, last = (
        load_checkpoint(type(model), tmp_path, rank=rank, plugins=plugins, pipeline_parallel_size=2)
        for rank in (0, 1)
    )
    embeds = first.embed_input_ids(torch.tensor(TEXT[2]))
    [through] = hidden_states([first, last], [torch.tensor(TEXT[2])], inputs_embeds=embeds)
    [whole] = hidden_states([model], [torch.tensor(TEXT[2])])
    assert_near(through, whole)
    assert not any(name.startswith("encoder") for name, _ in last.named_parameters())


def test_the_first_stage_has_the_layers_of_deepstack(tmp_path, plugins):
    qwen3_vl().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=r"2 layers .* lower pipeline_parallel_size"):
        ours(tmp_path, plugins, pipeline_parallel_size=2)


# Rules


def changed(item, **arrays):
    return Item(
        item.modality,
        {name: array for name, array in {**item.data, **arrays}.items() if array is not None},
    )


BAD = {
    "no grid": (changed(PICTURES[0], image_grid_thw=None), "must have image_grid_thw"),
    "something else": (changed(PICTURES[0], other=np.zeros(1)), "must have image_grid_thw"),
    "a grid of floats": (changed(PICTURES[0], image_grid_thw=np.array([1.0, 4, 6])), "3 integers"),
    "a grid of four": (changed(PICTURES[0], image_grid_thw=np.array([1, 4, 6, 1])), "3 integers"),
    "a grid that cannot be merged": (
        changed(PICTURES[0], image_grid_thw=np.array([1, 3, 8])),
        "multiples of 2",
    ),
    "a grid of nothing": (changed(PICTURES[0], image_grid_thw=np.array([1, 0, 6])), "positive"),
    "a negative grid": (changed(PICTURES[0], image_grid_thw=np.array([1, -4, -6])), "positive"),
    "a grid past all bounds": (
        changed(PICTURES[0], image_grid_thw=np.array([2**40, 2**20, 2**20])),
        "positive",
    ),
    "other patches": (
        changed(PICTURES[0], pixel_values=np.zeros((23, 96), np.float32)),
        r"shape \[24, 96\]",
    ),
    "integers": (changed(PICTURES[0], pixel_values=np.zeros((24, 96), np.int32)), "floats"),
    "infinity": (
        changed(PICTURES[0], pixel_values=np.full((24, 96), np.inf, np.float32)),
        "finite",
    ),
    "not a number": (
        changed(PICTURES[0], pixel_values=np.full((24, 96), np.nan, np.float32)),
        "finite",
    ),
    "embeddings of another size": (
        changed(PICTURES[0], pixel_values=None, embeds=np.zeros((6, 63), np.float32)),
        r"shape \[6, 64\]",
    ),
    "seconds of a picture": (
        changed(PICTURES[0], second_per_grid_ts=np.ones(1)),
        "must have image_grid_thw",
    ),
    "hours between frames": (video(3, 4, 4, 1e9), "too many"),
    "infinite seconds": (video(3, 4, 4, np.inf), "too many"),
    "no number of seconds": (video(3, 4, 4, np.nan), "too many"),
    "backwards": (video(3, 4, 4, -1.0), "too many"),
    "two seconds": (changed(video(3, 4, 4), second_per_grid_ts=np.ones(2)), "one number"),
    "more frames than tokens by the clock": (video(9, 2, 2), "too many"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_tower_does_not_take_is_refused(name):
    item, reason = BAD[name]
    with pytest.raises(RequestError, match=reason):
        rules_of(qwen2_5_vl()).replacement(item.modality, item.data)


def test_what_stands_for_an_item():
    rules = rules_of(qwen2_5_vl())
    assert [rules.placeholder_id(modality) for modality in rules.modalities] == [IMAGE, VIDEO]
    assert rules.replacement("image", picture(4, 6).data) == (
        [IMAGE] * 6,
        None,
        {"grid_thw": [1, 4, 6]},
    )
    clip = video(2, 4, 6, 0.5)
    assert rules.replacement("video", clip.data) == (
        [VIDEO] * 12,
        None,
        {"grid_thw": [2, 4, 6], "second_per_grid_ts": [0.5]},
    )
    embeds = {"embeds": np.zeros((6, 64), np.float16), "image_grid_thw": np.array([1, 4, 6])}
    assert rules.replacement("image", embeds) == rules.replacement("image", picture(4, 6).data)
    assert rules_of(qwen2_vl()).replacement("video", video(2, 4, 6).data).layout == {
        "grid_thw": [2, 4, 6]
    }


def test_example_items_are_what_the_rules_take(family):
    _, model, rules = family
    for modality, data in model.example_items():
        found = rules.replacement(
            modality, {name: array.to_numpy() for name, array in data.items()}
        )
        assert 0 < len(found.token_ids) < 512


def test_the_rules_need_no_torch():
    code = "import sys, toolkit_lm_vision.qwen2_vl_rules; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", by_day(*(name for name in FAMILIES if "," not in name)))
def test_bfloat16_error_is_that_of_transformers(name, tmp_path, plugins):
    """Both are compared with transformers in float32, on the weights that bfloat16 leaves."""
    half = random_qwen(name).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    exact = copy.deepcopy(half).float()
    model, rules = ours(tmp_path, plugins, dtype="bfloat16")
    prompts = [prompt for prompt in prompts_of(half, rules) if prompt.items]
    errors = []
    for prompt, found in zip(prompts, logits_of_prompts(model, prompts), strict=True):
        given = []
        for theirs in (exact, half):
            theirs.model.rope_deltas = None
            with torch.inference_mode():
                given.append(
                    theirs(input_ids=torch.tensor([prompt.token_ids]), **arguments(prompt))
                    .logits[0]
                    .float()
                )
        errors.append([(one - given[0]).abs().mean() for one in (found.float(), given[1])])
    ours_, theirs_ = torch.tensor(errors).mean(0)
    assert 0 < ours_ <= 1.2 * theirs_
