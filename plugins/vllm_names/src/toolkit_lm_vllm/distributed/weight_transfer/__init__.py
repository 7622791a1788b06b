"""vLLM's `vllm.distributed.weight_transfer`: no NCCL group carries weights here."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
