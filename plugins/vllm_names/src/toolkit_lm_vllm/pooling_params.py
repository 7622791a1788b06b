"""vLLM's `vllm.pooling_params`: pooling parameters."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import PoolingParams

__all__ = ["PoolingParams"]

__getattr__ = absent(__name__)
