"""vLLM's `vllm.distributed.weight_transfer.packed_tensor`: tensors on their way."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.weight_transfer import (
    packed_nccl_broadcast_consumer,
    packed_nccl_broadcast_producer,
)

__all__ = ["packed_nccl_broadcast_consumer", "packed_nccl_broadcast_producer"]

__getattr__ = absent(__name__)
