"""GLM-5: DeepSeek-V3.2, whose layers may share the choice of an earlier layer's indexer."""

from __future__ import annotations

from dataclasses import replace

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, layer_index
from toolkit_lm_decoder.llama import LlamaParts
from torch import Tensor

from toolkit_lm_deepseek.attention import DeepseekModel
from toolkit_lm_deepseek.deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32ForCausalLM,
    Indexer,
)
from toolkit_lm_deepseek.params import IndexShape

_KINDS = {"F": "full", "S": "shared"}


def has_indexer(config: HFConfig, layer: int) -> bool:
    """Whether a layer has an indexer of its own. Raises CheckpointError."""
    kinds = config.get("indexer_types", list)
    if kinds is None and (pattern := config.values.get("index_topk_pattern")) is not None:
        kinds = [_KINDS.get(kind, kind) for kind in pattern]
    if kinds is None:
        every = max(config.get("index_topk_freq", int, 1), 1)
        offset = config.get("index_skip_topk_offset", int, 2)
        return max(layer - offset + 1, 0) % every == 0
    kind = kinds[layer] if layer < len(kinds) else None
    if kind not in _KINDS.values():
        raise CheckpointError(
            f"config.json: 'indexer_types' must name one of {', '.join(_KINDS.values())} for "
            f"layer {layer}, not {kind!r}."
        )
    return bool(kind == "full")


class NeighbouringIndexer(Indexer):
    def paired(self, x: Tensor) -> Tensor:
        return x


class GlmMoeDsaAttention(DeepseekV32Attention):
    indexer_class = NeighbouringIndexer

    def index_shape(self, config: HFConfig) -> IndexShape | None:
        shape = super().index_shape(config)
        return shape if has_indexer(config, layer_index(self.prefix)) else None


class GlmMoeDsaModel(DeepseekModel):
    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        choice = None
        for layer in self.layers.owned:
            attention = layer.get_submodule("self_attn")
            assert isinstance(attention, GlmMoeDsaAttention)
            if attention.indexer is not None:
                choice = attention.attn.params.choice
            elif choice is None:
                raise CheckpointError(
                    f"config.json: by 'indexer_types', layer {layer_index(attention.prefix)} "
                    "shares the choice of an earlier layer, and its pipeline stage has none before "
                    "it."
                )
            else:
                attention.attn.params = replace(attention.attn.params, choice=choice)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    attention = GlmMoeDsaAttention
    decoder = GlmMoeDsaModel
