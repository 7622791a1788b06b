"""vLLM's `vllm.config.pooler`: the section of pooling."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.settings import PoolerConfig

__all__ = ["PoolerConfig"]

__getattr__ = absent(__name__)
