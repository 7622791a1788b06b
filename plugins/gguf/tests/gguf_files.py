"""Writes GGUF files from folders in Hugging Face layout, by the package gguf, as llama.cpp's
converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""Architectures in files by `model_type`."""
QUANTIZED_BY_GGUF = {Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4}
_HALVES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
"""Places of the float16 numbers in a block."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

Kind = Callable[[str], Type]
"""Name of a matrix in Hugging Face layout -> its type in the file."""


def random_blocks(kind: Type, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Blocks of random weights with a standard deviation of 0.05."""
    generator = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    halves = [generator.uniform(0.5, 2.0, raw.shape[:-1]) for _ in _HALVES[kind]]
    scale = 0.05 / _deviation(raw, kind, halves)
    _write(raw, kind, [half * scale for half in halves])
    return raw.reshape(*shape[:-1], -1)


def _deviation(raw: np.ndarray, kind: Type, halves: list[np.ndarray]) -> float:
    _write(raw, kind, halves)
    return float(gguf.dequantize(raw.reshape(len(raw), -1), kind).std())


def _write(raw: np.ndarray, kind: Type, halves: list[np.ndarray]) -> None:
    for at, half in zip(_HALVES[kind], halves, strict=True):
        raw[..., at : at + 2] = half.astype(np.float16)[..., None].view(np.uint8)


def quantized(array: np.ndarray, kind: Type) -> np.ndarray:
    """The weight in a type. Those that gguf cannot quantize to get random weights instead."""
    if kind in QUANTIZED_BY_GGUF or kind in (Type.F32, Type.F16, Type.BF16):
        return gguf.quantize(np.ascontiguousarray(array), kind)
    return random_blocks(kind, array.shape)


def write_gguf(
    path: Path,
    folder: Path,
    kind: Type | Kind = Type.F32,
    *,
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    without: frozenset[str] | set[str] = frozenset(),
    split: int = 0,
) -> dict[str, torch.Tensor]:
    """Converts a folder. Gives its weights as the file holds them, in float32.

    `metadata` are values in place of those that are right, None for none; `without` are names of
    tensors to leave out; `split` is the most tensors of a file, 0 for one file."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split)
    stated = {**_metadata(config, arch), **_tokenizer(folder, config, pre), **(metadata or {})}
    for key, value in stated.items():
        _add(writer, key.format(arch=arch), value)
    held = {}
    for name, array in _rope(config).items():
        writer.add_tensor(name, array)
    for name, (array, own) in _tensors(folder, config, arch).items():
        of = kind if isinstance(kind, Type) else kind(own)
        # Norms and routers stay floats, as llama.cpp leaves them.
        of = of if array.ndim > 1 and "ffn_gate_inp" not in name else Type.F32
        packed = quantized(array, of)
        if name not in without:
            writer.add_tensor(name, packed, raw_dtype=of)
        held |= _undone(own, np.array(gguf.dequantize(packed, of)), config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in held.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    rope = config["rope_parameters"]
    everywhere = rope.get("full_attention", rope)
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kind = everywhere["rope_type"]
    own = {
        "{arch}.context_length": config["max_position_embeddings"],
        "{arch}.embedding_length": config["hidden_size"],
        "{arch}.block_count": config["num_hidden_layers"],
        "{arch}.feed_forward_length": config["intermediate_size"],
        "{arch}.attention.head_count": config["num_attention_heads"],
        "{arch}.attention.head_count_kv": config["num_key_value_heads"],
        "{arch}.attention.key_length": head_size,
        "{arch}.attention.value_length": head_size,
        "{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "{arch}.rope.freq_base": float(everywhere["rope_theta"]),
        "{arch}.rope.dimension_count": int(
            head_size * everywhere.get("partial_rotary_factor", 1.0)
        ),
        "{arch}.attention.sliding_window": config.get("sliding_window"),
        "{arch}.attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "{arch}.final_logit_softcapping": config.get("final_logit_softcapping"),
        "{arch}.expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "{arch}.expert_used_count": config.get("num_experts_per_tok"),
        "{arch}.expert_feed_forward_length": config.get("moe_intermediate_size"),
        "{arch}.logit_scale": config.get("logits_scaling"),
        "{arch}.embedding_scale": config.get("embedding_multiplier"),
        "{arch}.residual_scale": config.get("residual_multiplier"),
        "{arch}.attention.scale": config.get("attention_multiplier"),
    }
    if kind in ("linear", "yarn"):
        own["{arch}.rope.scaling.type"] = kind
        own["{arch}.rope.scaling.factor"] = float(everywhere["factor"])
    if kind in ("yarn", "longrope"):
        own["{arch}.rope.scaling.original_context_length"] = config.get(
            "original_max_position_embeddings"
        ) or everywhere.get("original_max_position_embeddings")
    return own


def _tokenizer(folder: Path, config: Mapping[str, Any], pre: str) -> dict[str, Any]:
    stated = json.loads((folder / "tokenizer.json").read_text())
    texts = {index: text for text, index in stated["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in stated["added_tokens"]}
    template = folder / "chat_template.jinja"
    tokens = texts | special
    types = dict.fromkeys(texts, 1) | dict.fromkeys(special, 3)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(config["vocab_size"])],
        "tokenizer.ggml.token_type": [types.get(i, 5) for i in range(config["vocab_size"])],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stated["model"]["merges"]] or None,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.ggml.padding_token_id": config["pad_token_id"],
        "tokenizer.chat_template": template.read_text()
        if template.exists()
        else json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template"),
    }


def _rope(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Factors of the frequencies of rotary embeddings, as tensors."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{name}.weight": np.array(rope[f"{name}_factor"], np.float32)
            for name in ("short", "long")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    made = LlamaConfig(**{key: value for key, value in config.items() if key != "dtype"})
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](made, torch.device("cpu"))[0].double()
    size = 2 * len(frequencies)
    plain = rope["rope_theta"] ** -(torch.arange(0, size, 2).double() / size)
    return {"rope_freqs.weight": (plain / frequencies).float().numpy()}


def _tensors(
    folder: Path, config: Mapping[str, Any], arch: str
) -> dict[str, tuple[np.ndarray, str]]:
    """Tensors of the file, each with the name in Hugging Face layout."""
    enumerated = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(enumerated, config["num_hidden_layers"])
    weights = {name: tensor.float().numpy() for name, tensor in _weights(folder).items()}
    stacked: dict[str, dict[int, np.ndarray]] = {}
    for name in [name for name in weights if _EXPERT.fullmatch(name)]:
        prefix, index, part = _EXPERT.fullmatch(name).groups()
        stacked.setdefault(f"{prefix}.{part}.weight", {})[int(index)] = weights.pop(name)
    weights |= {
        name: np.stack([experts[i] for i in range(len(experts))])
        for name, experts in stacked.items()
    }
    return {
        names.get_name(name, (".weight", ".bias")): (_done(name, array, config), name)
        for name, array in weights.items()
    }


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Heads of a weight that llama.cpp permutes."""
    if config["model_type"] not in ("llama", "mistral", "mixtral", "granite"):
        return None
    key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return config[key[part]] if (part := name.split(".")[-2]) in key else None


def _adds_one(name: str, config: Mapping[str, Any]) -> bool:
    return config["model_type"].startswith("gemma") and "norm" in name


def _done(name: str, array: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """A weight as llama.cpp's convert_hf_to_gguf.py writes it."""
    if heads := _heads(name, config):
        array = array.reshape(heads, 2, len(array) // heads // 2, *array.shape[1:])
        array = array.swapaxes(1, 2).reshape(-1, *array.shape[3:])
    return array + 1 if _adds_one(name, config) else array


def _undone(name: str, array: np.ndarray, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A weight of the file in Hugging Face layout."""
    if heads := _heads(name, config):
        array = array.reshape(heads, len(array) // heads // 2, 2, *array.shape[1:])
        array = array.swapaxes(1, 2).reshape(-1, *array.shape[3:])
    if _adds_one(name, config):
        array = array - 1
    if ".experts." not in name:
        return {name: array}
    prefix, part = name.removesuffix(".weight").rsplit(".", 1)
    return {f"{prefix}.{index}.{part}.weight": one for index, one in enumerate(array)}
