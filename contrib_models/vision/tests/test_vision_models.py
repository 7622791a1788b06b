"""Vision models against transformers, on random checkpoints in float32."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, ToolkitError
from toolkit_lm.model import Absent
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import assert_bf16_error, checkpoint_config, load_checkpoint, run_ranks
from vision_families import FAMILIES, VOCAB, pictures, random_model
from vision_harness import encoded, logits_of_prompts, prompt_of

MOST = 1e-4
TEXT = [[11, 12, 13, 14, 15, 16, 17], [21, 22], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory, plugins):
    """The model of transformers, ours, and our rules."""
    theirs = random_model(request.param)
    folder = tmp_path_factory.mktemp("vision")
    theirs.save_pretrained(folder)
    return theirs, *ours(folder, plugins)


def ours(folder, plugins, **options):
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = load_checkpoint(plugins.models.load(architecture), folder, plugins=plugins, **options)
    return model, plugins.models.load_multimodal(architecture)(checkpoint_config(folder))


@torch.inference_mode()
def their_logits(theirs, prompt) -> torch.Tensor:
    inputs = {"input_ids": torch.tensor([prompt.token_ids])}
    if prompt.pictures:
        inputs["pixel_values"] = torch.cat(prompt.pictures)
    if theirs.config.model_type == "gemma3":
        inputs["token_type_ids"] = torch.tensor([prompt.is_picture]).long()
    return theirs(**inputs).logits[0]


def test_embeddings_of_pictures(family):
    theirs, model, _ = family
    given = pictures(theirs, 3)
    with torch.inference_mode():
        expected = theirs.get_image_features(
            torch.cat(given), return_dict=True, **selection(theirs)
        ).pooler_output
    found = encoded(model, given)
    assert len(found) == 3
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= MOST * other.abs().max()


def selection(theirs) -> dict:
    if theirs.config.model_type != "llava":
        return {}
    return {
        name: getattr(theirs.config, name)
        for name in ("vision_feature_layer", "vision_feature_select_strategy")
    }


def test_logits_of_prompts(family):
    """Several pictures among text, one picture, none: one flat batch."""
    theirs, model, rules = family
    a, b, c = pictures(theirs, 3)
    prompts = [
        prompt_of(rules, TEXT[0], a, TEXT[1], b, TEXT[2]),
        prompt_of(rules, c, TEXT[0]),
        prompt_of(rules, TEXT[2]),
        prompt_of(rules, TEXT[0], a, b),
        prompt_of(rules, a),
    ]
    found = logits_of_prompts(model, prompts)
    for prompt, logits in zip(prompts, found, strict=True):
        expected = their_logits(theirs, prompt)
        assert logits.shape == (len(prompt.token_ids), VOCAB)
        assert (logits - expected).abs().max() <= MOST * max(1.0, float(expected.abs().max()))


def in_memory(name: str) -> str:
    """Name of a weight in the memory of transformers 5, and in checkpoints of some versions."""
    name = name.replace("language_model.model.", "model.language_model.").replace(
        "language_model.lm_head.", "lm_head."
    )
    return f"model.{name}" if name.startswith(("vision_tower.", "multi_modal_projector.")) else name


def oldest(name: str) -> str:
    """Name of a weight in transformers 4."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


@pytest.mark.parametrize("rename", [in_memory, oldest])
@pytest.mark.parametrize("family", ["llava", "llava, SigLIP less a patch", "gemma3"])
def test_names_of_other_versions(family, rename, tmp_path, plugins):
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path)
    prompt = None
    found = []
    for names in (str, rename):
        weights = {
            names(name): tensor
            for name, tensor in load_file(tmp_path / "model.safetensors").items()
        }
        if names is oldest:
            weights["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(17)[None]
        save_file(weights, tmp_path / "model.safetensors")
        model, rules = ours(tmp_path, plugins)
        prompt = prompt or prompt_of(rules, TEXT[0], *pictures(theirs, 1), TEXT[1])
        found.extend(logits_of_prompts(model, [prompt]))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("vision_tower.encoder.layers.0.mlp.fc1.weight", lambda x: None),
        ("language_model.model.layers.1.mlp.up_proj.weight", lambda x: None),
        ("multi_modal_projector.linear_1.bias", lambda x: x[1:]),
    ],
)
def test_weights_that_are_missing_or_do_not_fit(name, change, tmp_path, plugins):
    random_model("llava").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    changed = change(weights.pop(name))
    save_file(
        weights if changed is None else {**weights, name: changed}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=name.removeprefix("language_model.").replace(".", r"\.")
    ):
        ours(tmp_path, plugins)


def test_a_weight_that_no_part_has_is_refused(tmp_path, plugins):
    random_model("llava").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {**weights, "vision_tower.encoder.layers.0.extra": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"1 unexpected: vision_tower.encoder.layers.0.extra"):
        ours(tmp_path, plugins)


def test_layers_that_give_nothing_are_not_there(tmp_path, plugins):
    random_model("llava").save_pretrained(tmp_path)
    tower = ours(tmp_path, plugins)[0].encoder.vision_tower
    assert len(tower.encoder.layers) == 2 and not hasattr(tower, "post_layernorm")


def sparse(folder, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_config": {"model_type": "radio"}}, "no vision tower of model_type 'radio'"),
        (
            {"vision_config": {"hidden_size": 30, "num_attention_heads": 4}},
            "describes no vision tower",
        ),
        (
            {"vision_config": {"num_hidden_layers": 10**9}},
            "num_hidden_layers of 'vision_config' must be from 1 to 1024, not 1000000000",
        ),
        ({"vision_config": {"image_size": 4096, "patch_size": 1}}, "describes no vision tower"),
        ({"vision_config": {"image_size": 4, "patch_size": 8}}, "describes no vision tower"),
        ({"vision_config": {"hidden_size": 0}}, "hidden_size of 'vision_config' must be from 1"),
        ({"vision_config": {"patch_size": "7"}}, "'patch_size' must be of type int"),
        ({"vision_feature_layer": 4}, "'vision_feature_layer' must name some of 3 layers, not 4"),
        ({"vision_feature_layer": []}, "'vision_feature_layer' must name some of 3 layers"),
        (
            {"vision_feature_select_strategy": "mean"},
            "'vision_feature_select_strategy' must be one of",
        ),
        ({"text_config": {"model_type": "mystery", "hidden_size": 64}}, "MysteryForCausalLM"),
        ({"text_config": None}, "no 'text_config'"),
    ],
)
def test_configs_that_describe_no_model(fields, message, tmp_path, plugins):
    random_model("llava").save_pretrained(tmp_path)
    sparse(tmp_path, **fields)
    with pytest.raises(ToolkitError, match=message):
        ours(tmp_path, plugins)


@pytest.mark.parametrize(
    "family", ["llava, several layers", "llava, SigLIP less a patch", "gemma3"]
)
def test_two_ranks_compute_what_one_does(family, tmp_path, plugins):
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path)
    model, rules = ours(tmp_path, plugins)
    a, b = pictures(theirs, 2)
    prompts = [prompt_of(rules, TEXT[0], a, TEXT[1]), prompt_of(rules, b, TEXT[2])]
    (expected,) = [torch.cat(logits_of_prompts(model, prompts))]

    def on_rank(rank: int) -> torch.Tensor:
        shard = load_checkpoint(
            type(model), tmp_path, rank=rank, plugins=plugins, tensor_parallel_size=2
        )
        sizes = [
            one.encoder.vision_tower.encoder.layers[0].mlp.fc1.output_size for one in (shard, model)
        ]
        assert 2 * sizes[0] == sizes[1]
        return torch.cat(logits_of_prompts(shard, prompts))

    for found in run_ranks(on_rank):
        assert (found - expected).abs().max() <= MOST * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_two_stages_compute_what_one_does(family, tmp_path, plugins):
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path)
    model, rules = ours(tmp_path, plugins)
    prompts = [prompt_of(rules, TEXT[0], picture, TEXT[1]) for picture in pictures(theirs, 2)]
    first, last = (
        load_checkpoint(type(model), tmp_path, rank=rank, plugins=plugins, pipeline_parallel_size=2)
        for rank in range(2)
    )
    assert isinstance(last.encoder, Absent)
    for one, other in zip(
        logits_of_prompts(first, prompts, last), logits_of_prompts(model, prompts), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("family", ["llava", "llava, SigLIP and Qwen2", "gemma3"])
def test_bfloat16(family, tmp_path, plugins):
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path)
    model, rules = ours(tmp_path, plugins, dtype="bfloat16")
    a, b, c = pictures(theirs, 3)
    prompts = [prompt_of(rules, TEXT[0], a, TEXT[1], b), prompt_of(rules, c, TEXT[2])]
    exact = [their_logits(theirs, prompt) for prompt in prompts]
    found = logits_of_prompts(model, prompts)
    half = theirs.bfloat16()
    rounded = [
        prompt._replace(pictures=[one.bfloat16() for one in prompt.pictures]) for prompt in prompts
    ]
    assert found[0].dtype is torch.bfloat16
    assert_bf16_error(found, [their_logits(half, prompt) for prompt in rounded], exact)
