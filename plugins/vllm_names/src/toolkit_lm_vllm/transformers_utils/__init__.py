"""vLLM's `vllm.transformers_utils`: tokenizers."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
