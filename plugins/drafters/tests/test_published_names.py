"""The heads that other tests load and compare have the tensor names of published checkpoints.

The names are those that vLLM 0.32.0 reads, in vllm/model_executor/models/{llama_eagle,llama_eagle3,
deepseek_mtp,glm4_moe_mtp,qwen3_next_mtp,mimo_mtp}.py, of checkpoints such as
yuhuili/EAGLE-LLaMA3-Instruct-8B, yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, SpecForge's and speculators'
heads, deepseek-ai/DeepSeek-V3, zai-org/GLM-4.5, Qwen/Qwen3-Next-80B-A3B-Instruct and
XiaomiMiMo/MiMo-7B-RL. Checkpoints in float8 have a weight_scale_inv beside each weight. N is the
first layer after the model's, and E an expert.
"""

from __future__ import annotations

import re

import pytest
import torch
from draft_heads import (
    DRAFTS,
    Eagle1,
    Eagle3,
    assert_same_drafts,
    drafted,
    make_target,
    randomize,
    save_head,
)
from safetensors.torch import load_file, save_file
from test_mtp import CASES
from toolkit_lm_drafters.eagle import EagleDrafter
from toolkit_lm_drafters.mtp_heads import LAYOUTS, find_layout, head_and_name

MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
MLA = tuple(
    f"self_attn.{name}.weight"
    for name in (
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "kv_b_proj",
        "o_proj",
    )
)
EXPERTS = tuple(f"mlp.experts.E.{name}_proj.weight" for name in ("gate", "up", "down"))
ROUTED = ("mlp.gate.weight", "mlp.gate.e_score_correction_bias", *EXPERTS)
SHARED = tuple(f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down"))
NEXTN = (
    "embed_tokens.weight",
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "shared_head.head.weight",
)


def under(prefix: str, *names: str) -> set[str]:
    return {f"{prefix}.{name}" for name in names}


EAGLE_1 = {"embed_tokens.weight", "fc.weight"} | under(
    "layers.0", *ATTENTION, *MLP, "post_attention_layernorm.weight"
)
EAGLE_3 = {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"} | under(
    "midlayer", *ATTENTION, *MLP, *NORMS, "hidden_norm.weight"
)
MTP = {
    "deepseek": under("model.layers.N", *NEXTN, *NORMS, *MLA, *ROUTED, *SHARED),
    "glm": under("model.layers.N", *NEXTN, *NORMS, *MLA, *ROUTED, *SHARED),
    "glm 4.5": under(
        "model.layers.N",
        *(*NEXTN, *NORMS, *ATTENTION, *BIASES, *ROUTED, *SHARED),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ),
    "qwen": under(
        "mtp",
        "fc.weight",
        "norm.weight",
        "pre_fc_norm_embedding.weight",
        "pre_fc_norm_hidden.weight",
    )
    | under(
        "mtp.layers.0",
        *(*NORMS, *ATTENTION, *EXPERTS, "mlp.gate.weight", "mlp.shared_expert_gate.weight"),
        *(f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    ),
    "mimo": under(
        "model.mtp_layers.0",
        *(*NORMS, *ATTENTION, *BIASES, *MLP),
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "input_proj.weight",
        "final_layernorm.weight",
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return make_target(folder), str(folder)


def with_embedding(tensors, model):
    return tensors | {"embed_tokens.weight": model.model.embed_tokens.weight.detach().clone()}


def as_speculators(tensors, model):
    """The names of speculators, and of heads that vLLM has written."""
    return {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in with_embedding(tensors, model).items()
    }


def below_model(tensors, model):
    own = ("lm_head.", "d2t", "t2d")
    return {
        name if name.startswith(own) else f"model.{name}": tensor
        for name, tensor in with_embedding(tensors, model).items()
    }


FILES = {
    "EAGLE-1": (Eagle1, with_embedding, EAGLE_1),
    "EAGLE-3": (Eagle3, lambda tensors, model: tensors, EAGLE_3),
    "EAGLE-3 of SpecForge": (Eagle3, with_embedding, EAGLE_3 | {"embed_tokens.weight"}),
    "EAGLE-3 of speculators": (
        Eagle3,
        as_speculators,
        {name.replace("midlayer.", "layers.0.") for name in EAGLE_3 | {"embed_tokens.weight"}},
    ),
    "EAGLE-3 below model": (Eagle3, below_model, None),
}
BY_DAY = ("EAGLE-1", "EAGLE-3 of speculators")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in BY_DAY else pytest.mark.nightly) for case in FILES],
)
def test_an_eagle_head_under_its_published_names(target, monkeypatch, tmp_path, case):
    kind, rename, names = FILES[case]
    model, folder = target
    third = kind is Eagle3
    head = randomize(kind(model, **({"draft_vocab_size": 60} if third else {})))
    path = save_head(head, tmp_path, **({"draft_vocab_size": 60} if third else {}))
    tensors = rename(load_file(tmp_path / "model.safetensors"), model)
    assert names is None or set(tensors) == names
    save_file(tensors, tmp_path / "model.safetensors")
    options = [f"model={path}", f"num_speculative_tokens={DRAFTS}"]
    seen, _ = drafted(folder, monkeypatch, EagleDrafter, "eagle", options)
    assert_same_drafts(head, model, seen)


@pytest.mark.parametrize("case", MTP)
def test_mtp_heads_have_the_published_names(case):
    """test_mtp.py loads these files, and compares their drafts' logits with the formula."""
    torch.manual_seed(3)
    model, head = CASES[case]()
    first = model.config.num_hidden_layers
    written = [name for name, _ in head.tensors()]
    shown = {
        re.sub(
            r"experts\.\d+\.",
            "experts.E.",
            name.replace(f"model.layers.{first}.", "model.layers.N."),
        )
        for name in written
    }
    assert shown == MTP[case]
    found = find_layout(written, first)
    assert found is not None and found[1] == 1
    start = first if found[0].counts_on else 0
    assert all(head_and_name(found[0], name, start) is not None for name in written)
    assert found[0] in LAYOUTS
