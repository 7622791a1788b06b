"""vLLM's `vllm.model_executor.model_loader`: the loader of what each rank has of a model."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.sharded_state import ShardedStateLoader

__all__ = ["ShardedStateLoader"]

__getattr__ = absent(__name__)
