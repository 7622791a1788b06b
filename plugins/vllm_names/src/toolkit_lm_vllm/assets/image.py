"""vLLM's `vllm.assets.image`: pictures of vLLM's examples."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.assets import ImageAsset

__all__ = ["ImageAsset"]

__getattr__ = absent(__name__)
