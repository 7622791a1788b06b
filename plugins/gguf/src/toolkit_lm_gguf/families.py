"""Families of models in GGUF files: what a family's tensors are called in Hugging Face layout, and
their sizes. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Row = tuple[str, str]
"""Name of a module in Hugging Face layout, and its size by letters: those of `Sizes`."""

_OUTSIDE: dict[str, Row] = {
    "token_embd": ("model.embed_tokens", "V H"),
    "output_norm": ("model.norm", "H"),
    "output": ("lm_head", "V H"),
}
_LLAMA: dict[str, Row] = {
    "attn_norm": ("input_layernorm", "H"),
    "attn_q": ("self_attn.q_proj", "Q H"),
    "attn_k": ("self_attn.k_proj", "K H"),
    "attn_v": ("self_attn.v_proj", "K H"),
    "attn_output": ("self_attn.o_proj", "H Q"),
    "ffn_norm": ("post_attention_layernorm", "H"),
    "ffn_gate": ("mlp.gate_proj", "I H"),
    "ffn_up": ("mlp.up_proj", "I H"),
    "ffn_down": ("mlp.down_proj", "H I"),
}
_HEAD_NORMS: dict[str, Row] = {
    "attn_q_norm": ("self_attn.q_norm", "D"),
    "attn_k_norm": ("self_attn.k_norm", "D"),
}
_GEMMA: dict[str, Row] = _LLAMA | {
    "post_attention_norm": ("post_attention_layernorm", "H"),
    "ffn_norm": ("pre_feedforward_layernorm", "H"),
    "post_ffw_norm": ("post_feedforward_layernorm", "H"),
}


def _without(rows: Mapping[str, Row], *names: str) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if name not in names}


_NO_MLP = _without(_LLAMA, "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture."""

    architecture: str
    """The model class in config.json."""
    model_type: str
    layer: Mapping[str, Row] = field(default_factory=lambda: _LLAMA)
    """Modules of a layer, by the stem of their name in the file. "{e}" in a module's name is the
    number of an expert: the tensor holds all experts, along its first dimension."""
    outside: Mapping[str, Row] = field(default_factory=lambda: _OUTSIDE)
    is_permuted: bool = False
    """Whether the two halves of each head of queries and keys are interleaved."""
    norms_plus_one: bool = False
    """Whether 1 has been added to the weights of norms."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(architecture="LlamaForCausalLM", model_type="llama", is_permuted=True),
    "qwen2": Family(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM", model_type="qwen3", layer=_LLAMA | _HEAD_NORMS
    ),
    "qwen3moe": Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer=_NO_MLP
        | _HEAD_NORMS
        | {
            "ffn_gate_inp": ("mlp.gate", "E H"),
            "ffn_gate_exps": ("mlp.experts.{e}.gate_proj", "E M H"),
            "ffn_up_exps": ("mlp.experts.{e}.up_proj", "E M H"),
            "ffn_down_exps": ("mlp.experts.{e}.down_proj", "E H M"),
        },
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM", model_type="gemma2", layer=_GEMMA, norms_plus_one=True
    ),
    "gemma3": Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=_GEMMA | _HEAD_NORMS,
        norms_plus_one=True,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        layer=_without(_LLAMA, "attn_q", "attn_k", "attn_v", "ffn_gate")
        | {
            "attn_qkv": ("self_attn.qkv_proj", "Q+K+K H"),
            "ffn_up": ("mlp.gate_up_proj", "I+I H"),
        },
    ),
    "granite": Family(architecture="GraniteForCausalLM", model_type="granite", is_permuted=True),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        layer=_without(_LLAMA, "attn_norm", "ffn_norm")
        | {
            "attn_q_norm": ("self_attn.q_norm", "Q"),
            "attn_k_norm": ("self_attn.k_norm", "K"),
            "post_attention_norm": ("post_attention_layernorm", "H"),
            "post_ffw_norm": ("post_feedforward_layernorm", "H"),
        },
    ),
}
"""Families by `general.architecture`."""

MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    is_permuted=True,
    layer=_NO_MLP
    | {
        "ffn_gate_inp": ("block_sparse_moe.gate", "E H"),
        "ffn_gate_exps": ("block_sparse_moe.experts.{e}.w1", "E I H"),
        "ffn_up_exps": ("block_sparse_moe.experts.{e}.w3", "E I H"),
        "ffn_down_exps": ("block_sparse_moe.experts.{e}.w2", "E H I"),
    },
)
"""The family of files of the architecture "llama" that state experts."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json is made from, and no module holds."""
_NAME = re.compile(r"(?:blk\.(\d{1,9})\.)?(\w+)\.(weight|bias)")
_MODULE = re.compile(r"(?:model\.)?(?:layers\.(\d{1,9})\.)?(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.experts\.)(\d{1,9})(\..*)")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file's tensor in Hugging Face layout."""

    module: str
    """Name of the module; with "{e}" for the number of the expert."""
    suffix: str
    """"weight" or "bias"."""
    size: str
    """Its size by letters."""
    stem: str
    """The file's name of the module in its layer."""

    @property
    def name(self) -> str:
        return f"{self.module}.{self.suffix}"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its size, of the sizes that letters stand for."""
        return tuple(
            sum(sizes[letter] for letter in letters.split("+")) for letters in self.size.split()
        )

    @property
    def is_stacked(self) -> bool:
        """Whether the tensor holds all experts."""
        return "{e}" in self.module


def file_name(family: Family, name: str) -> tuple[str, int | None] | None:
    """The file's tensor that has a tensor of Hugging Face layout in it, and the number of the
    expert. None: the family has no such tensor."""
    found = _MODULE.fullmatch(name)
    if found is None:
        return None
    layer, module, suffix = found.groups()
    rows = family.outside if layer is None else family.layer
    prefix = "" if layer is None else f"blk.{int(layer)}."
    expert = _EXPERT.fullmatch(module)
    own = module if expert is None else f"{expert[1]}{{e}}{expert[3]}"
    for stem, (candidate, _) in rows.items():
        if own == candidate.removeprefix("model." if layer is None else ""):
            index = None if expert is None else int(expert[2])
            return f"{prefix}{stem}.{suffix}", index
    return None


def place_of(family: Family, name: str) -> Place | None:
    """The place of a tensor of a file; None: the family has no such tensor."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    layer, stem, suffix = found.groups()
    row = (family.outside if layer is None else family.layer).get(stem)
    if row is None:
        return None
    module, size = row
    prefix = "" if layer is None else f"model.layers.{int(layer)}."
    return Place(prefix + module, suffix, size if suffix == "weight" else size.split()[0], stem)
