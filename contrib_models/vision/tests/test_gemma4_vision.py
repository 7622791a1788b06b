"""Gemma 4 with pictures against transformers, on random checkpoints in float32."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from picture_subjects import PictureSubject, write_marks
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError, RequestError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import (
    MultimodalConformance,
    assert_bf16_error,
    checkpoint_config,
    load_checkpoint,
    randomize,
    run_ranks,
)
from toolkit_lm_vision.gemma4_rules import Gemma4Shape
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from vision_families import TEXT, VOCAB
from vision_harness import sequences, spans_of

NAME = "Gemma4ForConditionalGeneration"
IMAGE = 7
BEGIN = 8
END = 9
MARKS = {"<|image|>": IMAGE, "<|image>": BEGIN, "<image|>": END}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 32,
    "subsampling_conv_channels": [8, 4],
}
PROCESSOR = {
    "image_processor_type": "Gemma4ImageProcessor",
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "max_soft_tokens": 70,
    # Else every picture has about as many tokens as it may.
    "do_resize": False,
}


def gemma4(kind):
    layers = ["sliding_attention", "full_attention"] * 2
    text = {
        **TEXT,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 24,
        "sliding_window": 24,
        "layer_types": layers,
        "hidden_size_per_layer_input": 48,
        "vocab_size_per_layer_input": VOCAB,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 70,
    }
    audio = None
    if kind == "small":
        # The smaller models have recordings, bounds, causal pictures, shared keys.
        text |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        vision |= {"use_clipped_linears": True}
        audio = AUDIO
    else:
        text |= {
            "use_bidirectional_attention": "vision",
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
        }
        vision |= {"standardize": True}
    config = Gemma4Config(
        text_config=text,
        vision_config=vision,
        audio_config=audio,
        image_token_id=IMAGE,
        boi_token_id=BEGIN,
        eoi_token_id=END,
        video_token_id=VOCAB - 1,
        audio_token_id=VOCAB - 2,
    )
    model = Gemma4ForConditionalGeneration(config)
    randomize(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("_min", "_max")) and "vision" in name:
                buffer.fill_(2.5 if name.endswith("max") else -2.0)
            if name.endswith(("std_bias", "std_scale")):
                buffer.copy_(torch.rand(buffer.shape) + 0.5)
    return model.eval()


def make_gemma4(folder, kind):
    model = gemma4(kind)
    model.save_pretrained(folder)
    write_marks(folder, MARKS)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return PictureSubject(
        folder,
        model,
        "<|image|>",
        lambda arrays, i: (
            f"<|image>{'<|image|>' * int(arrays['num_soft_tokens_per_image'][i])}<image|>"
        ),
        # From 1 to 16 tokens.
        lambda random: tuple(8 * random.integers(1, 5, 2)),
        left_out=("num_soft_tokens_per_image",),
        extra=lambda ids: {"mm_token_type_ids": (ids == IMAGE).long()},
        family=kind,
    )


@pytest.fixture(scope="module", params=["small", "large"])
def reference(request, tmp_path_factory):
    return make_gemma4(tmp_path_factory.mktemp("gemma4"), request.param)


class TestGemma4(MultimodalConformance):
    modality = "image"

    def num_scarce_blocks(self, reference):
        return 48


def ours(folder, **options):
    plugins = Plugins.load()
    return load_checkpoint(plugins.models.load(NAME), folder, plugins=plugins, **options)


def rules_of(folder):
    return Plugins.load().models.load_multimodal(NAME)(checkpoint_config(folder))


def encoded(model, arrays):
    items = [
        {name: arrays[name][i : i + 1] for name in ("pixel_values", "image_position_ids")}
        for i in range(len(arrays["pixel_values"]))
    ]
    with torch.inference_mode():
        return model.encode_items("image", items, lambda lengths: sequences(model, lengths))


def of_transformers(reference, arrays):
    with torch.inference_mode():
        return reference.model.model.get_image_features(
            arrays["pixel_values"], arrays["image_position_ids"], return_dict=True
        ).pooler_output


def test_embeddings_of_pictures(reference):
    """Of several sizes in a batch; on two ranks, too."""
    arrays = reference.inputs("<|image|>" * 3, reference.items(3, seed=1))
    expected = of_transformers(reference, arrays)
    found = [encoded(ours(reference.folder), arrays)]
    found += run_ranks(
        lambda rank: encoded(ours(reference.folder, rank=rank, tensor_parallel_size=2), arrays), 2
    )
    for some in found:
        for one, other in zip(some, expected, strict=True):
            assert one.shape == other.shape
            assert (one - other).abs().max() <= 1e-4 * max(1.0, float(other.abs().max()))


@torch.inference_mode()
def logits_of(model, inputs):
    """Logits [T, V] of a prompt with pictures, computed in one step."""
    ids = inputs["input_ids"][0]
    inside = ids == IMAGE
    spans = spans_of(SimpleNamespace(token_ids=ids.tolist(), is_picture=inside.tolist()))
    embeds = model.embed_input_ids(ids)
    embeds[inside] = torch.cat(encoded(model, inputs))
    with sequences(model, [len(ids)], spans):
        states = model(ids, torch.arange(len(ids)), inputs_embeds=embeds)
    return model.compute_logits(states)


@pytest.mark.parametrize("reference", ["large"], indirect=True)
def test_logits_on_two_ranks_and_in_bfloat16(reference):
    inputs = reference.inputs("see <|image|> and <|image|>?", reference.items(2, seed=4))
    with torch.inference_mode():
        exact = reference.model(**inputs).logits[0]
        half = type(reference.model).from_pretrained(reference.folder, dtype=torch.bfloat16).eval()
        rounded = {**inputs, "pixel_values": inputs["pixel_values"].bfloat16()}
        theirs = half(**rounded).logits[0]
    found = run_ranks(
        lambda rank: logits_of(ours(reference.folder, rank=rank, tensor_parallel_size=2), inputs), 2
    )
    for some in found:
        assert (some - exact).abs().max() <= 1e-4 * max(1.0, float(exact.abs().max()))
    model = ours(reference.folder, dtype="bfloat16")
    assert_bf16_error([logits_of(model, inputs)], [theirs], [exact])


def test_embeddings_in_the_place_of_a_picture(reference):
    text = "see <|image|> there"
    [image] = reference.items(1, seed=3)
    [embeds] = of_transformers(reference, reference.inputs(text, [image]))
    prompt = {"prompt": text, "multi_modal_data": {"image": [embeds.numpy()]}}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(reference.folder), device="cpu", max_model_len=128, num_kv_blocks=64) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        with pytest.raises(RequestError, match="takes no audio, only image"):
            llm.chat(
                [
                    {
                        "role": "user",
                        "content": [{"type": "input_audio", "input_audio": {"data": ""}}],
                    }
                ]
            )
    assert list(output.outputs[0].token_ids) == reference.greedy(text, [image], 8)[1]


def test_what_is_no_picture_is_refused(reference):
    rules = rules_of(reference.folder)
    given = reference.inputs("<|image|>", reference.items(1))
    good = {name: given[name].numpy() for name in ("pixel_values", "image_position_ids")}
    assert rules.replacement("image", good).mask is not None
    pixels, places = good.values()
    turned = places.copy()
    turned[0, [0, 1]] = turned[0, [1, 0]]
    for wrong, reason in (
        ({}, "must have pixel_values and image_position_ids"),
        ({"pixel_values": pixels}, "must have pixel_values and image_position_ids"),
        ({**good, "more": pixels}, "must have"),
        ({**good, "pixel_values": pixels[..., 1:]}, "floats of shape"),
        ({**good, "pixel_values": np.full_like(pixels, np.inf)}, "finite"),
        ({**good, "image_position_ids": places[:, 1:]}, "integers of shape"),
        ({**good, "image_position_ids": turned}, "columns and rows"),
        ({**good, "image_position_ids": places + 1}, "columns and rows"),
        ({"embeds": np.zeros((2, 63), np.float32)}, "floats of shape"),
    ):
        with pytest.raises(RequestError, match=reason):
            rules.replacement("image", wrong)


def test_towers_of_no_sense_are_refused(reference):
    config = reference.model.config.to_dict()

    def read(**changed):
        return Gemma4Shape.read({"vision_config": {**config["vision_config"], **changed}})

    with pytest.raises(CheckpointError, match="describes no vision tower"):
        read(head_dim=6)
    with pytest.raises(CheckpointError, match="pooling_kernel_size"):
        read(pooling_kernel_size=0)
    with pytest.raises(UnsupportedError, match="rope_type"):
        read(rope_parameters={"rope_type": "linear"})
