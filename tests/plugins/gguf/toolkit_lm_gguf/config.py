"""What config.json would say of a GGUF file."""

from __future__ import annotations

from typing import Any

from toolkit_lm.errors import CheckpointError, UnsupportedError

from toolkit_lm_gguf.file import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = {"F32": "float32", "F16": "float16"}
"""By the type of the matrices; those of others are dequantized."""


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Raises UnsupportedError for what no model class is known to compute, CheckpointError for a
    file that lacks something."""
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path} has the architecture {file.architecture!r}. Able: "
            f"{', '.join(ARCHITECTURES)}."
        )
    tensors = file.tensors()
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight.")
    scaling = file.get("{arch}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise UnsupportedError(
            f"{file.path} scales its rotary embeddings ({scaling}), which is not read."
        )
    embedding = tensors["token_embd.weight"]
    config = {
        "architectures": [ARCHITECTURES[file.architecture]],
        "model_type": file.architecture,
        "vocab_size": int(embedding.shape[1]),
        "hidden_size": file.require("{arch}.embedding_length"),
        "intermediate_size": file.require("{arch}.feed_forward_length"),
        "num_hidden_layers": file.require("{arch}.block_count"),
        "num_attention_heads": file.require("{arch}.attention.head_count"),
        "num_key_value_heads": file.get(
            "{arch}.attention.head_count_kv", file.require("{arch}.attention.head_count")
        ),
        "head_dim": file.get("{arch}.attention.key_length"),
        "max_position_embeddings": file.require("{arch}.context_length"),
        "rms_norm_eps": file.require("{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.get("{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.get("tokenizer.ggml.eos_token_id"),
        "dtype": _DTYPES.get(embedding.tensor_type.name, "bfloat16"),
    }
    return {key: value for key, value in config.items() if value is not None}
