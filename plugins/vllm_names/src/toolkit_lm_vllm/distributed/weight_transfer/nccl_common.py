"""vLLM's `vllm.distributed.weight_transfer.nccl_common`: the trainer's end of a group."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.weight_transfer import trainer_init

__all__ = ["trainer_init"]

__getattr__ = absent(__name__)
