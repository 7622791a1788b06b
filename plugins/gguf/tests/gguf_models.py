"""Small models of each family that is in GGUF files."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from toolkit_lm import VllmConfig
from toolkit_lm.model.loader import load_model
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_devkit import assert_same_logits, logits_of, make_checkpoint

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
GEMMA = {**SHAPE, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
CASES = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, sizes of heads": ("llama", {"head_dim": 24}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "qwen3, yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma3": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "phi3": ("phi3", {"sliding_window": 12}),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
    ),
    "granite": (
        "granite",
        {
            "logits_scaling": 2.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "olmo2": ("olmo2", {}),
}
"""`model_type` and fields of the config, by what it is."""


def checkpoint(folder: Path, model_type: str, **fields) -> Path:
    torch.manual_seed(0)
    shape = GEMMA if model_type.startswith("gemma") else SHAPE
    config = transformers.AutoConfig.for_model(model_type, **(shape | fields))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    return make_checkpoint(folder, model)


def reference(folder: Path, held: dict[str, torch.Tensor]) -> transformers.PreTrainedModel:
    """The model of transformers with the weights that a file holds."""
    copied = folder.with_name("dequantized")
    copied.mkdir()
    shutil.copy(folder / "config.json", copied)
    save_file(held, copied / "model.safetensors", metadata={"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32).eval()


def load(path: Path, rank: int = 0, **options):
    """The model as rank `rank` holds it, with kernels that compute in float32."""
    plugins = Plugins.load()
    options |= {"device": "cpu", "dtype": "float32", "kernels": "torch"}
    asked = VllmConfig.make(model=str(path), **options)
    config = resolve(asked, plugins).with_rank(rank)
    model_cls = plugins.models.load(config.checkpoint.architecture)
    return load_model(model_cls, config, torch.device("cpu"), plugins)


@torch.inference_mode()
def assert_parity(model, theirs, count: int = 60):
    tokens = torch.arange(3, 3 + count)
    assert_same_logits(logits_of([model], tokens), theirs(tokens[None]).logits[0])
