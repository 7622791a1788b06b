"""vLLM's `vllm.multimodal.image`: pictures."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.media import convert_image_mode

__all__ = ["convert_image_mode"]

__getattr__ = absent(__name__)
