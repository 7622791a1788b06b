"""vLLM's `vllm.distributed.device_communicators.pynccl`: broadcasts of tensors, here by Gloo."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.weight_transfer import PyNcclCommunicator

__all__ = ["PyNcclCommunicator"]

__getattr__ = absent(__name__)
