"""Rotary tables are those of transformers, for every rope_type; and rotating by them is its
formula."""

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import HFConfig
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from toolkit_lm_rotary.scaling import _SCALINGS
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb as rotate_halves,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

HEADS = 4
HEAD_SIZE = 32
MAX_POSITIONS = 256
BASE = {
    "hidden_size": HEADS * HEAD_SIZE,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_POSITIONS,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "short_factor": [1.0 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
    "original_max_position_embeddings": 64,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3 partial": {"rope_type": "llama3", "partial_rotary_factor": 0.5, **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn partial": {
        "rope_type": "yarn",
        "factor": 4.0,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64,
    },
    "yarn not truncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "yarn attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.7,
        "original_max_position_embeddings": 64,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.5,
        "original_max_position_embeddings": 64,
    },
    "yarn betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "original_max_position_embeddings": 64,
    },
    "longrope": {"rope_type": "longrope", **LONGROPE},
    "longrope factor": {"rope_type": "longrope", "factor": 8.0, **LONGROPE},
    "longrope attention factor": {"rope_type": "longrope", "attention_factor": 1.25, **LONGROPE},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "proportional factor": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.5,
        "factor": 2.0,
    },
}


def parameters(config):
    return RopeParameters.read(HFConfig(config), HEAD_SIZE)


def frequencies_by_transformers(rope, max_len):
    config = LlamaConfig(**BASE, rope_parameters={"rope_theta": 10000.0, **rope})
    if rope["rope_type"] == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=max_len)


def test_every_rope_type_of_transformers_is_known():
    assert set(_SCALINGS) == {"default", *ROPE_INIT_FUNCTIONS}
    assert set(_SCALINGS) == {rope["rope_type"] for rope in SCALINGS.values()}


@pytest.mark.parametrize("max_len", [48, MAX_POSITIONS, 700])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name, max_len):
    expected, expected_factor = frequencies_by_transformers(dict(SCALINGS[name]), max_len)
    given, factor = parameters(
        {**BASE, "rope_parameters": {"rope_theta": 10000.0, **SCALINGS[name]}}
    ).inverse_frequencies(max_len)
    assert torch.equal(given, expected)
    assert factor == expected_factor


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_the_older_way_of_stating_it(key):
    scaling = {
        name: value for name, value in SCALINGS["yarn partial"].items() if name != "rope_type"
    }
    old = {**BASE, "rope_theta": 500000.0, "rope_scaling": {key: "yarn", **scaling}}
    new = {**BASE, "rope_parameters": {"rope_theta": 500000, "rope_type": "yarn", **scaling}}
    given, expected = (parameters(config).inverse_frequencies(512) for config in (old, new))
    assert torch.equal(given[0], expected[0])
    assert given[1] == expected[1]


def test_nothing_stated_is_the_default_with_theta_10000():
    given, _ = parameters(
        {**BASE, "rope_parameters": None, "rope_scaling": None}
    ).inverse_frequencies(512)
    torch.testing.assert_close(given, 10000.0 ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))


def test_layers_can_differ():
    config = HFConfig(
        {
            **BASE,
            "rope_parameters": {
                "full": SCALINGS["linear"],
                "window": {"rope_type": "default", "rope_theta": 100.0},
            },
        }
    )
    full, window = (
        RopeParameters.read(config, HEAD_SIZE, layer_type=kind) for kind in ("full", "window")
    )
    assert (full.rope_type, full.theta, window.rope_type, window.theta) == (
        "linear",
        10000.0,
        "default",
        100.0,
    )


def test_the_first_training_length_stated_beside_wins():
    rope = parameters(
        {**BASE, "original_max_position_embeddings": 32, "rope_parameters": SCALINGS["longrope"]}
    )
    assert rope.original_max_positions == 32
    assert rope.stretch == 8


def test_longrope_has_an_older_name():
    older, newer = (
        parameters({**BASE, "rope_scaling": {"type": kind, **LONGROPE}})
        for kind in ("su", "longrope")
    )
    assert torch.equal(older.inverse_frequencies(300)[0], newer.inverse_frequencies(300)[0])


def test_what_does_not_do_is_refused_by_name():
    with pytest.raises(
        UnsupportedError,
        match=r"unknown rope_type 'mystery'. Known: default, dynamic, linear, llama3, longrope, .*",
    ):
        parameters({**BASE, "rope_scaling": {"type": "mystery"}})
    with pytest.raises(CheckpointError, match="'low_freq_factor'"):
        parameters({**BASE, "rope_scaling": {"type": "llama3", "factor": 2.0}}).inverse_frequencies(
            512
        )
    with pytest.raises(CheckpointError, match="'short_factor' must have 16 entries, not 15"):
        rope = {**SCALINGS["longrope"], "short_factor": [1.0] * 15}
        parameters({**BASE, "rope_parameters": rope}).inverse_frequencies(64)
    with pytest.raises(
        CheckpointError, match="64 rotary dimensions do not fit into heads of size 32"
    ):
        rotary({"rope_type": "default", "partial_rotary_factor": 2.0})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": float("nan")},
        {"rope_theta": float("inf")},
        {"rope_theta": 10**400},
        {"rope_theta": 0},
        {"rope_theta": -1.0},
        {"partial_rotary_factor": -1.0},
        {**SCALINGS["yarn"], "factor": float("nan")},
        {**SCALINGS["yarn"], "beta_fast": -1.0},
        {**SCALINGS["yarn"], "rope_theta": 1.0},
        {**SCALINGS["yarn"], "original_max_position_embeddings": -5},
        {**SCALINGS["llama3"], "original_max_position_embeddings": "64"},
        {
            **SCALINGS["longrope"],
            "short_factor": [float("nan")] * 16,
            "long_factor": [float("nan")] * 16,
        },
        {**SCALINGS["longrope"], "short_factor": ["a"] * 16, "long_factor": ["a"] * 16},
        {**SCALINGS["longrope"], "attention_factor": float("inf")},
    ],
)
def test_values_that_give_no_angles_are_refused(change):
    with pytest.raises(CheckpointError):
        rotary({"rope_type": "default", "rope_theta": 10000.0, **change})


def test_a_rope_type_is_a_name():
    with pytest.raises(UnsupportedError, match="unknown rope_type"):
        parameters({**BASE, "rope_parameters": {"rope_type": ["default"]}})


def rotary(rope, **options):
    config = VllmConfig.default(max_model_len=300, **options)
    return RotaryEmbedding(parameters({**BASE, "rope_parameters": rope}), vllm_config=config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["default", "yarn"])
def test_rotating_halves_is_the_formula_of_llama(name, dtype):
    torch_dtype = getattr(torch, dtype)
    x = torch.randn(5, HEADS, HEAD_SIZE, dtype=torch_dtype)
    positions = torch.tensor([0, 7, 1, 250, 299])
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(**BASE, rope_parameters={"rope_theta": 10000.0, **SCALINGS[name]})
    )
    cos, sin = theirs(x, positions[None])
    expected, _ = rotate_halves(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    given = rotary(SCALINGS[name], dtype=dtype)(positions).rotate(x.clone())
    assert given.dtype == torch_dtype
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    torch.testing.assert_close(given, expected[0].transpose(0, 1), atol=tolerance, rtol=tolerance)


def test_rotating_neighbours_is_the_formula_of_glm_and_leaves_the_rest():
    x = torch.randn(5, HEADS, HEAD_SIZE)
    positions = torch.tensor([0, 7, 1, 250, 299])
    rope = parameters(
        {**BASE, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    )
    frequencies, _ = rope.inverse_frequencies(300)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)[None]
    heads = x.transpose(0, 1)[None]
    expected, _ = rotate_interleaved(heads, heads, angles.cos(), angles.sin())
    embedding = RotaryEmbedding(
        rope, interleaved=True, vllm_config=VllmConfig.default(max_model_len=300)
    )
    given = embedding(positions).rotate(x.clone())
    torch.testing.assert_close(given, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    assert torch.equal(given[..., HEAD_SIZE // 2 :], x[..., HEAD_SIZE // 2 :])


MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 7, 5]}


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_parameters": MROPE},
        {"rope_theta": 1e6, "rope_scaling": {**MROPE, "rope_type": "mrope"}},
    ],
)
def test_three_positions_of_a_token_are_those_of_qwen2_vl(stated):
    x = torch.randn(6, HEADS, HEAD_SIZE)
    positions = torch.stack(
        [
            torch.tensor([0, 7, 1, 250, 299, 3]),
            torch.tensor([0, 9, 4, 250, 2, 3]),
            torch.tensor([0, 7, 290, 1, 8, 3]),
        ]
    )
    cos, sin = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**BASE, rope_parameters=dict(MROPE)))(
        x, positions[:, None]
    )
    heads = x.transpose(0, 1)[None]
    expected, _ = rotate_halves(heads, heads, cos, sin)
    embedding = RotaryEmbedding(
        parameters({**BASE, **stated}), vllm_config=VllmConfig.default(max_model_len=300)
    )
    torch.testing.assert_close(
        embedding(positions).rotate(x.clone()), expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5
    )
    one = embedding(positions[0])
    three = embedding(positions[:1].expand(3, -1))
    assert torch.equal(one.cos, three.cos)
    assert torch.equal(one.sin, three.sin)


@pytest.mark.parametrize("sections", [[4, 7], [4, 7, 6], ["4", 7, 5], 16])
def test_sections_that_do_not_make_up_the_head_are_refused(sections):
    with pytest.raises(CheckpointError, match="mrope_section"):
        rotary({**MROPE, "mrope_section": sections})


def test_a_view_is_rotated_in_place_and_its_neighbours_stay():
    packed = torch.randn(6, 3 * HEADS * HEAD_SIZE)
    before = packed.clone()
    queries = packed[:, : HEADS * HEAD_SIZE].view(6, HEADS, HEAD_SIZE)
    rotation = rotary(SCALINGS["default"])(torch.arange(6) + 9)
    expected = rotation.rotate(queries.clone())
    rotation.rotate(queries)
    assert torch.equal(packed[:, : HEADS * HEAD_SIZE].view_as(expected), expected)
    assert torch.equal(packed[:, HEADS * HEAD_SIZE :], before[:, HEADS * HEAD_SIZE :])


def test_the_table_is_not_part_of_a_checkpoint():
    assert rotary(SCALINGS["default"]).state_dict() == {}
