"""vLLM's `vllm.usage.usage_lib`: reports of use, which nobody makes here."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import UsageContext

__all__ = ["UsageContext"]

__getattr__ = absent(__name__)
