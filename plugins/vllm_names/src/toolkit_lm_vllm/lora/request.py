"""vLLM's `vllm.lora.request`: an adapter of a request."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.lora_request import LoRARequest

__all__ = ["LoRARequest"]

__getattr__ = absent(__name__)
