"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: pictures and videos of any size with text. Tokens have
positions in time, height and width."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from toolkit_lm.model import HFConfig
from torch import Tensor

from toolkit_lm_vision.glm4v_tower import GlmPatchTower
from toolkit_lm_vision.qwen2_vl import Qwen2VLForConditionalGeneration, Qwen2VLImages


class Glm4vImages(Qwen2VLImages):
    kind = "glm4v"
    tower = GlmPatchTower

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights((name, _by_square(name, tensor)) for name, tensor in weights)


def _by_square(name: str, tensor: Tensor) -> Tensor:
    """The weight of a convolution over squares of patches, as that of a linear layer."""
    is_square = name.endswith("visual.downsample.weight") and tensor.ndim == 4
    return tensor.permute(0, 2, 3, 1).flatten(1) if is_square else tensor


class GlmOcrImages(Glm4vImages):
    kind = "glm_ocr"


class Glm4vForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """GLM-4.1V with its language-modeling head."""

    encoder_class = Glm4vImages
    tells_times = True
    language = {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"}
    defaults = {
        "attention_bias": True,
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
    }
    rope_defaults = {"mrope_section": [8, 12, 12]}


class Glm46VForConditionalGeneration(Glm4vForConditionalGeneration):
    """The dense GLM-4.6V-Flash with its language-modeling head."""


class Glm4vMoeForConditionalGeneration(Glm4vForConditionalGeneration):
    """GLM-4.5V and GLM-4.6V, whose language model has experts, with the language-modeling head."""

    language = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    defaults = {
        "attention_bias": True,
        "max_position_embeddings": 65_536,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    }


class GlmOcrForConditionalGeneration(Glm4vForConditionalGeneration):
    """GLM-OCR with its language-modeling head. Its layer that predicts a further token is left
    out."""

    encoder_class = GlmOcrImages
    defaults = {
        "attention_bias": False,
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
    }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(list(self._own(weights)))

    def _own(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        count = HFConfig(self.text_config()).require("num_hidden_layers", int)
        further = f"model.language_model.layers.{count}."
        for name, tensor in weights:
            if not name.startswith(further):
                yield name, tensor
