"""Qwen3-VL, dense and with experts: states of several layers of its tower are added after the first
layers of Qwen3. Tokens have positions in time, height and width, whose dimensions are interleaved
(M-RoPE)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import HFConfig
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_vision.qwen2_vl import Qwen2VLForConditionalGeneration, Qwen2VLImages
from toolkit_lm_vision.qwen3_vl_tower import LearnedPatchTower


class Qwen3VLImages(Qwen2VLImages):
    kind = "qwen3_vl"
    tower = LearnedPatchTower


class Qwen3VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen3-VL with its language-modeling head."""

    encoder_class = Qwen3VLImages
    tells_times = True
    language = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    defaults = {
        "rope_theta": 5e5,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "max_position_embeddings": 128_000,
    }
    rope_defaults = {"mrope_section": [24, 20, 20]}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        num_deep = len(self.shape.deep_layers)
        num_layers = HFConfig(self.text_config()).require("num_hidden_layers", int)
        if num_deep > num_layers // vllm_config.parallel.pipeline_parallel_size:
            raise UnsupportedError(
                f"config.json: states of {num_deep} layers of the vision tower are added after as "
                f"many of {num_layers} layers, which must all be in the first pipeline stage: "
                "lower pipeline_parallel_size."
            )

    def text_config(self) -> dict[str, Any]:
        found = super().text_config()
        # transformers interleaves, whatever the checkpoint says.
        found["rope_parameters"]["mrope_interleaved"] = True
        return found

    @property
    def embed_size(self) -> int:
        """Columns of `inputs_embeds`: those of DeepStack follow the hidden size's."""
        return self.shape.embed_size

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        # Zeros are what text adds, in embeddings as wide as those of items.
        embeds = super().embed_input_ids(input_ids)
        return F.pad(embeds, (0, self.embed_size - embeds.shape[-1]))


class Qwen3VLMoeForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen3-VL with experts."""

    language = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "norm_topk_prob": True,
    }
    defaults = {
        "rope_theta": 5e5,
        "num_key_value_heads": 16,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
    }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(list(self._turned(list(weights))))

    def _turned(self, weights: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Weights with those of experts as other families have them: files hold them with inputs
        before outputs. A tensor that is not square says whether these files do."""
        config = HFConfig(self.text_config())
        hidden = config.require("hidden_size", int)
        inner = config.require("moe_intermediate_size", int)
        turned = {"gate_up_proj": (hidden, 2 * inner), "down_proj": (inner, hidden)}
        of_experts = [
            (name.rpartition(".")[2], tuple(tensor.shape[1:]))
            for name, tensor in weights
            if ".experts." in name and tensor.ndim == 3
        ]
        are_turned = any(
            shape == turned.get(kind) for kind, shape in of_experts if shape[0] != shape[1]
        )
        for name, tensor in weights:
            is_turned = are_turned and ".experts." in name and tensor.ndim == 3
            yield name, tensor.transpose(1, 2) if is_turned else tensor


class Qwen35Images(Qwen2VLImages):
    kind = "qwen3_5"
    tower = LearnedPatchTower
    ignored = (r"^mtp\.",)


# The class names in config.json.
class Qwen3_5ForConditionalGeneration(  # noqa: N801
    Qwen2VLForConditionalGeneration
):
    """Qwen3.5 with its eyes and its language-modeling head."""

    encoder_class = Qwen35Images
    tells_times = True
    language = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    defaults = {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    }
    rope_defaults = {"mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}

    def text_config(self) -> dict[str, Any]:
        found = super().text_config()
        found["rope_parameters"]["mrope_interleaved"] = True
        return found


class Qwen3_5MoeForConditionalGeneration(  # noqa: N801
    Qwen3_5ForConditionalGeneration
):
    """Qwen3.5 with experts, its eyes and its language-modeling head."""

    language = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    defaults = {
        "head_dim": 256,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
    }
