"""A GGUF file in bf16 of a Llama or Qwen3 checkpoint, for llama.cpp. It has no tokenizer: prompts
are token ids.

usage: python race_gguf.py FILE OUT TYPE

With the Python of llama-cpp-python: writes a file in bf16 anew, in a type such as Q4_0 or Q4_K_M,
as llama.cpp quantizes it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3"}
"""Architectures by `model_type`, with their names in gguf.MODEL_ARCH."""


def write_gguf(checkpoint: Path, file: Path) -> Path:
    """Needs gguf, torch and safetensors. A file that is there is left as it is."""
    import gguf
    import torch
    from safetensors.torch import load_file

    if file.exists():
        return file
    config: Mapping[str, Any] = json.loads((checkpoint / "config.json").read_text())
    heads = config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    arch = gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]
    names = gguf.get_tensor_name_map(arch, layers)
    # Ends as a whole file, or as none.
    unfinished = file.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[arch])
    _add_config(writer, config)
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if arch is gguf.MODEL_ARCH.LLAMA and name.endswith(("q_proj.weight", "k_proj.weight")):
                tensor = interleave(tensor, heads if "q_proj" in name else kv_heads)
            target = names.get_name(name, try_suffixes=(".weight",))
            if target is None:
                raise ValueError(f"GGUF has no name for {name}")
            if tensor.dim() == 1:
                writer.add_tensor(target, tensor.float().numpy())
            else:
                raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
                writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(file)


def interleave(weight: Any, heads: int) -> Any:
    """Rows of a head in the order of llama.cpp's Llama, which rotates neighbours and not halves."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1)
        .transpose(1, 2)
        .reshape(weight.shape)
    )


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    import gguf

    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def quantize(file: Path, out: Path, kind: str) -> Path:
    """Needs llama-cpp-python."""
    import llama_cpp

    unfinished = out.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 2
    if llama_cpp.llama_model_quantize(str(file).encode(), str(unfinished).encode(), params):
        raise RuntimeError(f"llama.cpp could not write {file} in {kind}")
    return unfinished.rename(out)


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
