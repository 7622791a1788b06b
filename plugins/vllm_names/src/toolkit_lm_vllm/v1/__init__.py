"""vLLM's `vllm.v1`: the engine."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
