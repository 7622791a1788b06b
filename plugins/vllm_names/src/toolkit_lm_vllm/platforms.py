"""vLLM's `vllm.platforms`: the device that engines choose by themselves."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.platform import current_platform

__all__ = ["current_platform"]

__getattr__ = absent(__name__)
