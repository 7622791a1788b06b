"""vLLM's `vllm.distributed.device_communicators`: groups of trainers and workers."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
