"""Qwen2-Audio against transformers, on random checkpoints in float32, without an engine."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from audio_checkpoints import (
    AUDIO,
    FAMILIES,
    ITEM,
    MELS,
    STATES,
    VOCAB,
    make_subject,
    random_model,
    recordings,
)
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, RequestError, ToolkitError
from toolkit_lm.model import Absent, construct
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import assert_bf16_error, checkpoint_config, load_checkpoint, run_ranks
from transformers import AutoConfig, Qwen2AudioForConditionalGeneration
from vision_harness import sequences

MOST = 1e-4
NAME = "Qwen2AudioForConditionalGeneration"
LENGTHS = (1.0, 0.35, 0.123, 0.03, 0.985)
"""Seconds: a whole window, some of it, an odd number of frames and of states, and the least that is
heard."""


@pytest.fixture(scope="module")
def plugins():
    return Plugins.load()


@pytest.fixture(scope="module", params=FAMILIES)
def subject(request, tmp_path_factory):
    return make_subject(tmp_path_factory.mktemp("audio"), request.param)


def ours(folder, plugins, **options):
    model = load_checkpoint(plugins.models.load(NAME), folder, plugins=plugins, **options)
    return model, plugins.models.load_multimodal(NAME)(checkpoint_config(folder))


def items_of(subject, sounds) -> list[dict[str, torch.Tensor]]:
    """Output of transformers' processor for each sound."""
    made = [subject.inputs(ITEM, [one]) for one in sounds]
    return [
        {name: one[name] for name in ("input_features", "feature_attention_mask")} for one in made
    ]


@torch.inference_mode()
def encoded(model, items) -> list[torch.Tensor]:
    return model.encode_items("audio", items, lambda lengths: sequences(model, lengths))


@torch.inference_mode()
def logits_of(model, prompts, *stages) -> list[torch.Tensor]:
    """Logits [Ti, V] of prompts (tokens, items), all in one step."""
    lengths = [len(tokens) for tokens, _ in prompts]
    input_ids = torch.tensor([token for tokens, _ in prompts for token in tokens])
    embeds = model.embed_input_ids(input_ids)
    items = [item for _, items in prompts for item in items]
    if items:
        embeds[input_ids == AUDIO] = torch.cat(encoded(model, items))
    positions = torch.cat([torch.arange(length) for length in lengths])
    out = None
    for stage in (model, *stages):
        with sequences(stage, lengths):
            out = stage(
                input_ids,
                positions,
                inputs_embeds=embeds if stage is model else None,
                intermediate=out,
            )
    return list((model, *stages)[-1].compute_logits(out).split(lengths))


TEXTS = [
    (f"What is in {ITEM}, and in {ITEM}? Say it.", (0, 1)),
    (f"{ITEM}{ITEM}", (2, 4)),
    ("No sound.", ()),
    (f"a {ITEM}", (3,)),
]


def prompts_of(subject):
    """Prompts for transformers, and for us: several recordings among text, one, none."""
    sounds = recordings(*LENGTHS)
    theirs = []
    ours = []
    for text, chosen in TEXTS:
        inputs = subject.inputs(text, [sounds[i] for i in chosen])
        theirs.append(inputs)
        ours.append(
            (inputs["input_ids"][0].tolist(), items_of(subject, [sounds[i] for i in chosen]))
        )
    return theirs, ours


@torch.inference_mode()
def their_logits(model, inputs) -> torch.Tensor:
    return model(**inputs).logits[0]


def close(found, expected) -> bool:
    return bool((found - expected).abs().max() <= MOST * max(1.0, float(expected.abs().max())))


def test_embeddings_of_recordings(subject, plugins):
    model, rules = ours(subject.folder, plugins)
    sounds = recordings(*LENGTHS)
    caught = []
    hook = subject.model.model.multi_modal_projector.register_forward_hook(
        lambda _, given, out: caught.append(out)
    )
    their_logits(subject.model, subject.inputs(ITEM * len(sounds), sounds))
    hook.remove()
    items = items_of(subject, sounds)
    found = encoded(model, items)
    assert (
        [len(one) for one in found]
        == [25, 9, 3, 1, 25]
        == [
            len(
                rules.replacement(
                    "audio", {name: value.numpy() for name, value in item.items()}
                ).token_ids
            )
            for item in items
        ]
    )
    for one, other in zip(found, caught[0], strict=True):
        assert (one - other[: len(one)]).abs().max() <= MOST * other.abs().max()


def test_logits_of_prompts(subject, plugins):
    model, _ = ours(subject.folder, plugins)
    theirs, prompts = prompts_of(subject)
    for inputs, (tokens, _), logits in zip(theirs, prompts, logits_of(model, prompts), strict=True):
        assert logits.shape == (len(tokens), VOCAB)
        assert close(logits, their_logits(subject.model, inputs))


def test_what_a_recording_becomes_does_not_depend_on_what_is_beside_it(subject, plugins):
    model, _ = ours(subject.folder, plugins)
    items = items_of(subject, recordings(*LENGTHS))
    for one, other in zip(
        encoded(model, items), [encoded(model, [item])[0] for item in items], strict=True
    ):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_silence_after_a_recording_is_not_computed(subject, plugins):
    """Only what convolutions reach of it is read."""
    model, _ = ours(subject.folder, plugins)
    (item,) = items_of(subject, recordings(0.35))
    count = int(item["feature_attention_mask"].sum())
    changed = item["input_features"].clone()
    changed[:, :, count + 3 :] = 9.0
    lengths = []
    with torch.inference_mode():
        [found] = model.encode_items(
            "audio",
            [{**item, "input_features": changed}],
            lambda given: lengths.append(given) or sequences(model, given),
        )
    assert torch.equal(found, encoded(model, [item])[0])
    assert lengths == [[18]]


def in_memory(name: str) -> str:
    """Name of a weight in the memory of transformers 5."""
    name = name.replace("language_model.model.", "model.language_model.").replace(
        "language_model.lm_head.", "lm_head."
    )
    return f"model.{name}" if name.startswith(("audio_tower.", "multi_modal_projector.")) else name


def in_files(name: str) -> str:
    """Name of a weight in published files."""
    name = name.replace("model.language_model.", "language_model.model.").replace(
        "lm_head.", "language_model.lm_head."
    )
    name = name.replace("language_model.language_model.", "language_model.")
    return name.removeprefix("model.")


def test_names_of_other_versions(tmp_path, plugins):
    subject = make_subject(tmp_path)
    _, prompts = prompts_of(subject)
    expected = torch.cat(logits_of(ours(tmp_path, plugins)[0], prompts))
    for rename in (in_memory, in_files):
        saved = load_file(tmp_path / "model.safetensors")
        save_file(
            {rename(name): tensor for name, tensor in saved.items()}, tmp_path / "model.safetensors"
        )
        names = set(load_file(tmp_path / "model.safetensors"))
        assert any(
            name.startswith("model.audio_tower." if rename is in_memory else "audio_tower.")
            for name in names
        )
        assert (
            "lm_head.weight" if rename is in_memory else "language_model.lm_head.weight"
        ) in names
        assert torch.equal(torch.cat(logits_of(ours(tmp_path, plugins)[0], prompts)), expected)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("audio_tower.layers.0.fc1.weight", lambda x: None),
        ("audio_tower.embed_positions.weight", lambda x: x[1:]),
        ("multi_modal_projector.linear.bias", lambda x: x[1:]),
    ],
)
def test_weights_that_are_missing_or_do_not_fit(part, change, tmp_path, plugins):
    random_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith(part))
    changed = change(weights.pop(name))
    save_file(
        weights if changed is None else {**weights, name: changed}, tmp_path / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=part.replace(".", r"\.")):
        ours(tmp_path, plugins)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "whisper"}, "no audio tower of model_type 'whisper'"),
        (
            {"encoder_layers": 10**9},
            "encoder_layers of 'audio_config' must be from 1 to 1024, not 1000000000",
        ),
        ({"num_mel_bins": 0}, "num_mel_bins of 'audio_config' must be from 1"),
        ({"encoder_attention_heads": 5}, "must be a multiple of encoder_attention_heads"),
        ({"max_source_positions": "many"}, "'max_source_positions' must be of type int"),
    ],
)
def test_configs_that_describe_no_model(fields, message, tmp_path, plugins):
    random_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "audio_config": {**config["audio_config"], **fields}}))
    with pytest.raises(ToolkitError, match=message):
        ours(tmp_path, plugins)


def test_two_ranks_compute_what_one_does(tmp_path, plugins):
    subject = make_subject(tmp_path)
    model, _ = ours(tmp_path, plugins)
    _, prompts = prompts_of(subject)
    expected = torch.cat(logits_of(model, prompts))

    def on_rank(rank: int) -> torch.Tensor:
        shard = load_checkpoint(
            type(model), tmp_path, rank=rank, plugins=plugins, tensor_parallel_size=2
        )
        assert (
            2 * shard.encoder.audio_tower.layers[0].fc1.output_size
            == model.encoder.audio_tower.layers[0].fc1.output_size
        )
        return torch.cat(logits_of(shard, prompts))

    for found in run_ranks(on_rank):
        assert close(found, expected)


def test_two_stages_compute_what_one_does(tmp_path, plugins):
    subject = make_subject(tmp_path)
    model, _ = ours(tmp_path, plugins)
    _, prompts = prompts_of(subject)
    first, last = (
        load_checkpoint(type(model), tmp_path, rank=rank, plugins=plugins, pipeline_parallel_size=2)
        for rank in range(2)
    )
    assert isinstance(last.encoder, Absent)
    for one, other in zip(logits_of(first, prompts, last), logits_of(model, prompts), strict=True):
        assert torch.equal(one, other)


def test_bfloat16(tmp_path, plugins):
    subject = make_subject(tmp_path)
    model, _ = ours(tmp_path, plugins, dtype="bfloat16")
    theirs, prompts = prompts_of(subject)
    exact = [their_logits(subject.model, inputs) for inputs in theirs]
    found = logits_of(model, prompts)
    half = subject.model.bfloat16()
    rounded = [
        {name: one.bfloat16() if one.is_floating_point() else one for name, one in inputs.items()}
        for inputs in theirs
    ]
    assert found[0].dtype is torch.bfloat16
    assert_bf16_error(found, [their_logits(half, inputs) for inputs in rounded], exact)


PUBLISHED = {
    "architectures": [NAME],
    "audio_config": {
        "activation_function": "gelu",
        "d_model": 1280,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 128,
        "scale_embedding": False,
    },
    "audio_token_index": 151646,
    "ignore_index": -100,
    "model_type": "qwen2_audio",
    "text_config": {
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "intermediate_size": 11008,
        "max_position_embeddings": 8192,
        "model_type": "qwen2",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "vocab_size": 156032,
    },
    "torch_dtype": "bfloat16",
    "vocab_size": 156032,
}
"""Qwen2-Audio-7B-Instruct's."""


def test_weights_of_the_published_size_fit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    with torch.device("meta"):
        theirs = Qwen2AudioForConditionalGeneration(AutoConfig.from_pretrained(tmp_path))
    plugins = Plugins.load()
    config = checkpoint_config(tmp_path, dtype="bfloat16", max_model_len=4096)
    model = construct(plugins.models.load(NAME), config, torch.device("meta"), plugins)
    assert model.load_weights(dict(theirs.state_dict()).items())
    rules = plugins.models.load_multimodal(NAME)(config)
    ((_, data),) = model.example_items()
    found = rules.replacement("audio", {name: array.to_numpy() for name, array in data.items()})
    assert found.token_ids == [151646] * 750


def arrays(**changed) -> dict[str, np.ndarray]:
    mask = np.zeros((1, 2 * STATES), np.int32)
    mask[:, :20] = 1
    return {
        "input_features": np.zeros((1, MELS, 2 * STATES), np.float32),
        "feature_attention_mask": mask,
    } | changed


def holes() -> np.ndarray:
    mask = arrays()["feature_attention_mask"]
    mask[0, 5] = 0
    return mask


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must have input_features and feature_attention_mask, or embeds"),
        (arrays(other=np.zeros(1)), "and nothing else, not"),
        (
            arrays(input_features=np.zeros((1, MELS, 99), np.float32)),
            r"floats of shape \[1, 16, 100\], not float32 of shape \[1, 16, 99\]",
        ),
        (
            arrays(input_features=np.zeros((1, MELS, 100), np.int64)),
            "input_features must be floats",
        ),
        (arrays(input_features=np.full((1, MELS, 100), np.nan, np.float32)), "must be finite"),
        (arrays(input_features=np.full((1, MELS, 100), -np.inf, np.float32)), "must be finite"),
        (
            arrays(feature_attention_mask=np.ones((1, 99), np.int32)),
            r"integers of shape \[1, 100\]",
        ),
        (arrays(feature_attention_mask=np.ones((1, 100), np.float32)), "must be integers"),
        (
            arrays(feature_attention_mask=np.full((1, 100), 2, np.int32)),
            "must be ones, and zeros after them",
        ),
        (arrays(feature_attention_mask=holes()), "must be ones, and zeros after them"),
        (
            arrays(feature_attention_mask=np.zeros((1, 100), np.int32)),
            "it is too short: it has 0 frames",
        ),
        ({"embeds": np.zeros((26, 64), np.float32)}, "must be 1 to 25, not 26"),
        ({"embeds": np.zeros((0, 64), np.float32)}, "must be 1 to 25, not 0"),
        ({"embeds": np.zeros((3, 63), np.float32)}, r"floats of shape \[3, 64\]"),
        ({"embeds": np.zeros((), np.float32)}, "must be 1 to 25, not 0"),
    ],
)
def test_arrays_that_the_rules_refuse(data, message, tmp_path, plugins):
    random_model().save_pretrained(tmp_path)
    rules = plugins.models.load_multimodal(NAME)(checkpoint_config(tmp_path))
    assert len(rules.replacement("audio", arrays()).token_ids) == 5
    with pytest.raises(RequestError, match=message):
        rules.replacement("audio", data)


def test_an_audio_token_outside_the_vocabulary(tmp_path, plugins):
    random_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "audio_token_index": VOCAB}))
    rules = plugins.models.load_multimodal(NAME)(checkpoint_config(tmp_path))
    with pytest.raises(CheckpointError, match=f"the audio token {VOCAB} is not in the vocabulary"):
        rules.placeholder_id("audio")
