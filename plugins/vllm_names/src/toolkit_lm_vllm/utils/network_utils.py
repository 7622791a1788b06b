"""vLLM's `vllm.utils.network_utils`: addresses and ports."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import get_ip, get_open_port

__all__ = ["get_ip", "get_open_port"]

__getattr__ = absent(__name__)
