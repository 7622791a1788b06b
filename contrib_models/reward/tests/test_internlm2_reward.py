"""InternLM2's reward model, against its published formulas: LLaMA's, with wqkv packed as [KV head,
(queries, key, value), head size]."""

import json

import pytest
import torch
from reward_harness import PROMPTS, SMALL, load, rewards
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError
from toolkit_lm_reward.internlm2 import InternLM2ForRewardModel
from torch.nn import functional as F

HIDDEN, INNER, HEADS, KV_HEADS = (
    SMALL[key]
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
)
SIZE = HIDDEN // HEADS
THETA = 5000.0
EPS = 1e-5


def make_weights(bias):
    shapes = {
        "model.tok_embeddings.weight": (SMALL["vocab_size"], HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "v_head.weight": (1, HIDDEN),
    }
    for i in range(SMALL["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        projections = {
            "attention.wqkv": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
            "attention.wo": (HIDDEN, HIDDEN),
        }
        for name, shape in projections.items():
            shapes |= {f"{layer}{name}.weight": shape} | (
                {f"{layer}{name}.bias": shape[:1]} if bias else {}
            )
        shapes |= {f"{layer}feed_forward.w{n}.weight": (INNER, HIDDEN) for n in (1, 3)}
        shapes |= {f"{layer}feed_forward.w2.weight": (HIDDEN, INNER)}
        shapes |= {f"{layer}{name}.weight": (HIDDEN,) for name in ("attention_norm", "ffn_norm")}
    torch.manual_seed(0)
    return {name: torch.randn(shape) * 0.2 + ("norm" in name) for name, shape in shapes.items()}


def norm(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def rotate(x):
    """[T, heads, size], by the position of each token."""
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def reference(weights, prompt):
    x = weights["model.tok_embeddings.weight"][prompt]
    later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for i in range(SMALL["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{i}."): tensor
            for name, tensor in weights.items()
            if f"layers.{i}." in name
        }
        h = norm(x, own["attention_norm.weight"])
        qkv = F.linear(h, own["attention.wqkv.weight"], own.get("attention.wqkv.bias"))
        qkv = qkv.view(len(x), KV_HEADS, HEADS // KV_HEADS + 2, SIZE)
        q = qkv[:, :, :-2].flatten(1, 2)
        k = qkv[:, :, -2]
        v = qkv[:, :, -1]
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / SIZE**0.5
        mixed = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), v
        )
        x = x + F.linear(mixed.flatten(1), own["attention.wo.weight"], own.get("attention.wo.bias"))
        h = norm(x, own["ffn_norm.weight"])
        gate, up = (F.linear(h, own[f"feed_forward.w{n}.weight"]) for n in (1, 3))
        x = x + F.linear(F.silu(gate) * up, own["feed_forward.w2.weight"])
    return F.linear(norm(x, weights["model.norm.weight"]), weights["v_head.weight"])


def save(folder, bias):
    weights = make_weights(bias)
    save_file(weights, folder / "model.safetensors")
    config = {
        **SMALL,
        "architectures": ["InternLM2ForRewardModel"],
        "bias": bias,
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
    }
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_scaling": None, "hidden_act": "silu"})
    )
    return weights


@pytest.mark.parametrize("bias", [False, True])
def test_rewards_of_all_tokens(bias, tmp_path):
    weights = save(tmp_path, bias)
    model = load(InternLM2ForRewardModel, tmp_path)
    for given, prompt in zip(rewards(model), PROMPTS, strict=True):
        torch.testing.assert_close(given, reference(weights, prompt))


def test_packed_weights_that_do_not_fit(tmp_path):
    save(tmp_path, False)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.attention.wqkv.weight"] = torch.zeros(60, HIDDEN)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.attention.wqkv.weight has 60 rows, not 64"
    ):
        load(InternLM2ForRewardModel, tmp_path)
