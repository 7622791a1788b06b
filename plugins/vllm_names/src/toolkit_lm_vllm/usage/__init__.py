"""vLLM's `vllm.usage`: reports of use, which nobody makes here."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
