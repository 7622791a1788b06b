"""vLLM's `vllm.sequence`: log probabilities and times."""

from toolkit_lm.outputs import RequestMetrics
from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import Logprob

__all__ = ["Logprob", "RequestMetrics"]

__getattr__ = absent(__name__)
