"""vLLM's `vllm.logger`: logs."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import init_logger

__all__ = ["init_logger"]

__getattr__ = absent(__name__)
