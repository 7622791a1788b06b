"""vLLM's `vllm.model_executor`: a loader's name alone."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
