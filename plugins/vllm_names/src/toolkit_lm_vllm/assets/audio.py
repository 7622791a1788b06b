"""vLLM's `vllm.assets.audio`: recordings of vLLM's examples."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.assets import AudioAsset

__all__ = ["AudioAsset"]

__getattr__ = absent(__name__)
