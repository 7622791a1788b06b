"""vLLM's `vllm.distributed.utils`: groups of trainers and workers."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.weight_transfer import StatelessProcessGroup

__all__ = ["StatelessProcessGroup"]

__getattr__ = absent(__name__)
