"""vLLM's `vllm.distributed.parallel_state`: what is left to do at the end: nothing."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import cleanup_dist_env_and_memory

__all__ = ["cleanup_dist_env_and_memory"]

__getattr__ = absent(__name__)
