"""vLLM's `vllm.assets`: assets of vLLM's examples, where they lie in its cache."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
