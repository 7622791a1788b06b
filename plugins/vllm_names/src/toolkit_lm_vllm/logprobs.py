"""vLLM's `vllm.logprobs`: log probabilities."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import Logprob

__all__ = ["Logprob"]

__getattr__ = absent(__name__)
