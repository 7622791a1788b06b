"""vLLM's `vllm.assets.video`: videos of vLLM's examples."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.assets import VideoAsset

__all__ = ["VideoAsset"]

__getattr__ = absent(__name__)
