"""vLLM's `vllm.utils`: helpers."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.argument_parser import FlexibleArgumentParser
from toolkit_lm_vllm_names.helpers import Counter, cdiv, get_ip, get_open_port, random_uuid

__all__ = ["Counter", "FlexibleArgumentParser", "cdiv", "get_ip", "get_open_port", "random_uuid"]

__getattr__ = absent(__name__)
