"""Parity of Twin with its formula in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from toolkit_lm_devkit import ModelConformance, Reference, write_checkpoint
from torch import Tensor
from torch.nn import functional as F

CONFIG = {
    "architectures": ["TwinForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 100.0,
    "sliding_window": 6,
    "attention_multiplier": 0.4,
    "logit_scale": 0.5,
    "eos_token_id": 1,
    "dtype": "float32",
}


def random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """All weights of a checkpoint, by the names that they have there."""
    size, inner, vocab = (config[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    shapes = {"model.embed_tokens": (vocab, size), "model.norm": (size,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head"] = (vocab, size)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (size,),
            "self_attn.q_proj": (heads * config["head_dim"], size),
            "self_attn.k_proj": (kv_heads * config["head_dim"], size),
            "self_attn.v_proj": (kv_heads * config["head_dim"], size),
            "self_attn.o_proj": (size, heads * config["head_dim"]),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}.weight": 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def attend(config: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *, nearby: bool) -> Tensor:
    """q, k and v [heads, T, head_dim] of one layer -> [T, heads * head_dim]."""
    count, size = q.shape[1:]
    theta = config["rope_local_base_freq"] if nearby else config["rope_theta"]
    frequencies = theta ** (-torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(count), frequencies).repeat(1, 2)

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-right, left), dim=-1) * angles.sin()

    distance = torch.arange(count)[:, None] - torch.arange(count)[None]
    seen = (distance >= 0) & (distance < (config["sliding_window"] if nearby else count))
    k, v = (x.repeat_interleave(len(q) // len(k), dim=0) for x in (rotate(k), v))
    scores = rotate(q) @ k.transpose(1, 2) * config["attention_multiplier"]
    weights = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return (weights @ v).transpose(0, 1).flatten(1)


def reference(
    config: dict[str, Any], weights: dict[str, Tensor], token_ids: Sequence[int]
) -> Tensor:
    """Logits [T, V] of one sequence."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, config["head_dim"])).transpose(0, 1)

    x = weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(linear(h, f"{layer}.self_attn.{part}_proj")) for part in "qkv")
        attended = attend(config, q, k, v, nearby=i % 2 == 1)
        fed = linear(h, f"{layer}.mlp.up_proj").relu() ** 2
        x = (
            x
            + linear(attended, f"{layer}.self_attn.o_proj")
            + linear(fed, f"{layer}.mlp.down_proj")
        )
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return F.linear(norm(x, "model.norm"), head) * config["logit_scale"]


class TestTwin(ModelConformance):
    variants = {"grouped": {}, "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4}}
    tensor_parallel_sizes = (2,)

    def make_checkpoint(self, folder: Path, **variant: Any) -> Reference:
        config = CONFIG | variant
        weights = random_weights(config)
        write_checkpoint(folder, config, weights)
        return lambda token_ids: reference(config, weights, token_ids)
