"""vLLM's `vllm.config.weight_transfer`: the way by which a trainer sends weights."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.weight_config import WeightTransferConfig

__all__ = ["WeightTransferConfig"]

__getattr__ = absent(__name__)
