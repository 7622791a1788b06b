"""vLLM's `vllm.assets.base`: the cache of assets."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.assets import get_cache_dir, get_vllm_public_assets

__all__ = ["get_cache_dir", "get_vllm_public_assets"]

__getattr__ = absent(__name__)
