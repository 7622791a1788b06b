"""Weights of the families: what is left out, block-wise float8, int8 at load, experts without
tokens, and both forms of attention."""

import json

import pytest
import torch
from deepseek_families import GROUPS, make_glm, make_glm45, make_longcat, make_v2, make_v3
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import ChangingMethod
from toolkit_lm_deepseek.deepseek_v2 import DeepseekV2ForCausalLM
from toolkit_lm_deepseek.deepseek_v3 import DeepseekV3ForCausalLM
from toolkit_lm_deepseek.glm4_moe import Glm4MoeForCausalLM
from toolkit_lm_deepseek.glm4_moe_lite import Glm4MoeLiteForCausalLM
from toolkit_lm_deepseek.longcat_flash import LongcatFlashForCausalLM
from toolkit_lm_deepseek.params import LatentParams
from toolkit_lm_devkit import (
    assert_same_logits,
    load_checkpoint,
    logits_of,
    run_ranks,
    save_random,
)
from toolkit_lm_moe.experts import RoutedExperts
from toolkit_lm_quantize.schemes import Int8Scheme

TOKENS = torch.arange(3, 40)
BLOCK = 16


def logits(model):
    with torch.inference_mode():
        return model(TOKENS[None]).logits[0]


def edit(folder, weights, **fields):
    """Writes these weights, and these fields of config.json."""
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def is_quantized(name, tensor):
    """As DeepSeek's own checkpoints: projections, but not the router's."""
    return tensor.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "gate.w"))


def in_blocks(weight):
    """A weight [N, K] as float8 with a scale for each block, and what these stand for."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    dense = torch.empty_like(weight)
    for i in range(0, rows, BLOCK):
        for j in range(0, columns, BLOCK):
            part = slice(i, i + BLOCK), slice(j, j + BLOCK)
            scale = weight[part].abs().max() / 448
            scales[i // BLOCK, j // BLOCK] = scale
            codes[part] = (weight[part] / scale).to(torch.float8_e4m3fn)
            dense[part] = codes[part].float() * scale
    return {"weight": codes, "weight_scale_inv": scales}, dense


def test_float8_in_blocks(tmp_path):
    """DeepSeek's own format. Neither the latents' outputs nor those of heads end at a block."""
    theirs = make_v3()
    save_random(tmp_path, theirs)
    stored = {}
    dense = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if not is_quantized(name, tensor):
            stored[name] = dense[name] = tensor
            continue
        parts, dense[name] = in_blocks(tensor)
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    edit(tmp_path, dense)
    expected = logits(type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    edit(tmp_path, stored, quantization_config={**fp8, "weight_block_size": [BLOCK, BLOCK]})
    ours = load_checkpoint(
        DeepseekV3ForCausalLM, tmp_path, dtype="float32", kernels="torch", quantization="fp8"
    )
    assert_same_logits(logits_of([ours], TOKENS), expected)


def test_int8_at_load(tmp_path):
    theirs = make_v2(q_lora_rank=None)
    save_random(tmp_path, theirs)
    weights = load_file(tmp_path / "model.safetensors")
    ours = load_checkpoint(
        DeepseekV2ForCausalLM,
        tmp_path,
        dtype="float32",
        kernels="torch",
        quantization="int8 at load",
    )
    found = logits_of([ours], TOKENS)
    rounded = {
        name: Int8Scheme().round_trip(tensor)
        if tensor.ndim == 2 and "gate.weight" not in name
        else tensor
        for name, tensor in weights.items()
    }
    edit(tmp_path, rounded)
    expected = logits(type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval())
    assert_same_logits(found, expected)
    assert (found - logits(theirs)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "model_class"),
    [
        (make_v3, DeepseekV3ForCausalLM),
        (make_glm45, Glm4MoeForCausalLM),
        (make_glm, Glm4MoeLiteForCausalLM),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(tmp_path, make, model_class):
    theirs = make()
    save_random(tmp_path, theirs)
    weights = load_file(tmp_path / "model.safetensors")
    last = {name: x for name, x in weights.items() if name.startswith("model.layers.1.")}
    more = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in last.items()}
    for name in ("embed_tokens.weight", "shared_head.head.weight", "eh_proj.weight"):
        more[f"model.layers.2.{name}"] = torch.randn(4, 4)
    edit(tmp_path, weights | more, num_nextn_predict_layers=1)
    found = logits_of([load_checkpoint(model_class, tmp_path)], TOKENS)
    assert_same_logits(found, logits(theirs))
    edit(tmp_path, weights | more, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"unexpected: model\.layers\.2\."):
        load_checkpoint(model_class, tmp_path)


def test_half_of_a_head_of_glm_is_rotated_where_config_does_not_say(tmp_path):
    theirs = make_glm45()
    save_random(tmp_path, theirs)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("rope_parameters")["partial_rotary_factor"] == 0.5
    config.pop("partial_rotary_factor", None)
    path.write_text(json.dumps(config | {"rope_theta": 1e4}))
    assert_same_logits(
        logits_of([load_checkpoint(Glm4MoeForCausalLM, tmp_path)], TOKENS), logits(theirs)
    )


@pytest.mark.parametrize("expands", [True, False])
def test_absorbed_and_expanded_attention_give_the_same_logits(tmp_path, expands, monkeypatch):
    theirs = make_v3(**GROUPS)
    save_random(tmp_path, theirs)
    asked = []
    monkeypatch.setattr(LatentParams, "expands", lambda *sizes: asked.append(sizes) or expands)
    ours = load_checkpoint(DeepseekV3ForCausalLM, tmp_path)
    assert_same_logits(logits_of([ours], TOKENS), logits(theirs))
    assert asked


def test_nothing_is_computed_for_experts_without_tokens(tmp_path, monkeypatch):
    """All tokens go to experts that give them back."""
    theirs = make_longcat()
    for layer in theirs.model.layers:
        layer.mlp.router.e_score_correction_bias[8:] = 10
    save_random(tmp_path, theirs)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("e_score_correction_bias"):
            tensor[8:] = 10
    edit(tmp_path, weights)
    expected = logits(type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval())
    ours = load_checkpoint(LongcatFlashForCausalLM, tmp_path)
    called = []
    for module in ours.modules():
        if isinstance(module, RoutedExperts):
            for expert in module.children():
                expert.register_forward_hook(lambda *call: called.append(call))
    assert_same_logits(logits_of([ours], TOKENS), expected)
    assert not called


@pytest.mark.parametrize(
    ("make", "model_class"),
    [(make_v3, DeepseekV3ForCausalLM), (make_longcat, LongcatFlashForCausalLM)],
)
def test_ranks_that_hold_experts_whole_give_the_logits_of_one(tmp_path, make, model_class):
    theirs = make()
    save_random(tmp_path, theirs)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}

    def compute(rank):
        return logits_of([load_checkpoint(model_class, tmp_path, rank=rank, **options)], TOKENS)

    for found in run_ranks(compute):
        assert_same_logits(found, logits(theirs))


class Doubling(ChangingMethod):
    def change(self, x, out, rows):
        return out * 2


def test_an_adapter_of_the_up_projection_is_refused(tmp_path):
    """It would change chunks of prompts, and not the tokens that are decoded."""
    save_random(tmp_path, make_v2())
    ours = load_checkpoint(DeepseekV2ForCausalLM, tmp_path)
    attention = ours.model.layers[1].self_attn
    attention.kv_b_proj.wrap(Doubling)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.kv_b_proj.*Doubling"):
        logits_of([ours], TOKENS)
