"""vLLM's `vllm.utils.counter`: a counter."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import Counter

__all__ = ["Counter"]

__getattr__ = absent(__name__)
