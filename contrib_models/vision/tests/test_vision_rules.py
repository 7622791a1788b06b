"""Placeholders of pictures in prompts: counted like in transformers. Anything else than a picture
is refused."""

from __future__ import annotations

import sys
from subprocess import run

import numpy as np
import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm_vision.gemma3_rules import Gemma3Rules
from toolkit_lm_vision.llava_rules import LlavaRules

CLIP = {
    "model_type": "clip_vision_model",
    "image_size": 336,
    "patch_size": 14,
    "hidden_size": 1024,
    "num_attention_heads": 16,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "image_size": 384,
    "patch_size": 14,
    "hidden_size": 1152,
    "num_attention_heads": 16,
}
LLAVA = {
    "vision_config": {**CLIP, "num_hidden_layers": 24},
    "text_config": {"model_type": "llama", "vocab_size": 32064},
    "image_token_index": 32000,
}
"""Config of llava-1.5-7b: its text_config states no hidden size."""
GEMMA3 = {
    "vision_config": {**SIGLIP, "image_size": 896, "num_hidden_layers": 27},
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560},
    "mm_tokens_per_image": 256,
}
SMALL = {
    "vision_config": {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
    "text_config": {"hidden_size": 6, "vocab_size": 100},
    "image_token_index": 5,
}


def rules_of(kind, hf_config, **fields):
    return kind(VllmConfig.default({**hf_config, **fields}))


def pixels(rules, dtype="float32") -> np.ndarray:
    return np.zeros((1, *rules.shape.picture), dtype)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 576),
        ({"vision_feature_select_strategy": "full"}, 577),
        ({"vision_config": SIGLIP, "vision_feature_select_strategy": "full"}, 729),
        ({"vision_config": SIGLIP}, 728),
    ],
)
def test_tokens_of_llava(fields, count):
    rules = rules_of(LlavaRules, LLAVA, **fields)
    found = rules.replacement("image", {"pixel_values": pixels(rules)})
    assert found == ([32000] * count, None, {})
    assert found == rules.replacement("image", {"embeds": np.ones((count, 4096), np.float16)})
    assert (
        not rules.bidirectional and rules.placeholder_id("image") == 32000 and rules.surround == {}
    )


def test_tokens_of_gemma3():
    rules = rules_of(Gemma3Rules, GEMMA3)
    found = rules.replacement("image", {"pixel_values": pixels(rules)})
    assert found == ([255_999, *[262_144] * 256, 256_000], [False, *[True] * 256, False], {})
    assert found == rules.replacement("image", {"embeds": np.ones((256, 2560), np.float32)})
    assert found == rules.replacement(
        "image", {"pixel_values": pixels(rules), "num_crops": np.array([0])}
    )
    with pytest.raises(RequestError, match=r"num_crops must be \[0\]"):
        rules.replacement("image", {"pixel_values": pixels(rules), "num_crops": np.array([2])})
    with pytest.raises(RequestError, match="nothing else"):
        rules.replacement(
            "image", {"embeds": np.ones((256, 2560), np.float32), "num_crops": np.array([0])}
        )
    assert (
        rules.bidirectional
        and rules.placeholder_id("image") == 255_999
        and rules.surround == {"image": ("\n\n", "\n\n")}
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must have pixel_values, or embeds, and nothing else, not \\[\\]"),
        ({"pixels": np.zeros((1, 3, 8, 8))}, "and nothing else, not \\['pixels'\\]"),
        ({"pixel_values": np.zeros((1, 3, 8, 8)), "embeds": np.zeros((4, 6))}, "and nothing else"),
        (
            {"pixel_values": np.zeros((3, 8, 8))},
            "must have the shape \\[1, 3, 8, 8\\], not \\[3, 8, 8\\]",
        ),
        ({"pixel_values": np.zeros((2, 3, 8, 8))}, "not \\[2, 3, 8, 8\\]"),
        ({"pixel_values": np.zeros((1, 3, 8, 9))}, "not \\[1, 3, 8, 9\\]"),
        ({"pixel_values": np.zeros((0,))}, "not \\[0\\]"),
        ({"pixel_values": np.zeros((1, 3, 8, 8), np.uint8)}, "must be floats, not uint8"),
        ({"pixel_values": np.full((1, 3, 8, 8), np.nan)}, "must be finite"),
        ({"pixel_values": np.full((1, 3, 8, 8), -np.inf)}, "must be finite"),
        ({"pixel_values": np.full((1, 3, 8, 8), 1e300)}, "must be finite"),
        (
            {"embeds": np.zeros((5, 6))},
            "embeds of an image must have the shape \\[4, 6\\], not \\[5, 6\\]",
        ),
        ({"embeds": np.zeros((4, 7))}, "not \\[4, 7\\]"),
        ({"embeds": np.zeros((4, 6), np.complex64)}, "must be floats, not complex64"),
    ],
)
def test_what_is_no_picture(data, message):
    rules = rules_of(LlavaRules, SMALL)
    with pytest.raises(RequestError, match=message):
        rules.replacement("image", data)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            LlavaRules,
            {**LLAVA, "image_token_index": 40_000},
            "the image token 40000 is not in the vocabulary",
        ),
        (LlavaRules, {**LLAVA, "image_token_index": -1}, "is not in the vocabulary"),
        (
            LlavaRules,
            {**LLAVA, "image_token_index": "<image>"},
            "'image_token_index' must be of type int",
        ),
        (
            Gemma3Rules,
            {**GEMMA3, "mm_tokens_per_image": 255},
            "64 x 64 patches cannot be pooled into mm_tokens_per_image=255",
        ),
        (Gemma3Rules, {**GEMMA3, "mm_tokens_per_image": 0}, "cannot be pooled"),
        (Gemma3Rules, {**GEMMA3, "mm_tokens_per_image": 65**2}, "cannot be pooled"),
        (Gemma3Rules, {**GEMMA3, "mm_tokens_per_image": 33**2}, "cannot be pooled"),
    ],
)
def test_configs_without_a_picture(kind, fields, message):
    with pytest.raises(CheckpointError, match=message):
        rules_of(kind, fields)


def test_rules_need_no_torch():
    code = (
        "import sys, toolkit_lm_vision.llava_rules, toolkit_lm_vision.gemma3_rules; assert "
        "'torch' not in sys.modules"
    )
    run([sys.executable, "-c", code], check=True)
