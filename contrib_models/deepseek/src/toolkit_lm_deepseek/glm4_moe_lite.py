"""GLM-4.7-Flash: DeepSeek-V3's attention and routing."""

from __future__ import annotations

from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig

from toolkit_lm_deepseek.deepseek_v3 import DeepseekV3ForCausalLM

_KINDS = ("dense", "sparse")


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    num_dense = 1

    @classmethod
    def is_dense(cls, config: HFConfig, layer: int) -> bool:
        """`mlp_layer_types` says it; without it, the first `first_k_dense_replace` are dense."""
        kinds = config.get("mlp_layer_types", list)
        if kinds is None:
            return super().is_dense(config, layer)
        kind = kinds[layer] if layer < len(kinds) else None
        if kind not in _KINDS:
            raise CheckpointError(
                f"config.json: 'mlp_layer_types' must name one of {', '.join(_KINDS)} for layer "
                f"{layer}, not {kind!r}."
            )
        return bool(kind == "dense")
