"""vLLM's `vllm.utils.math_utils`: numbers."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import cdiv

__all__ = ["cdiv"]

__getattr__ = absent(__name__)
