"""vLLM's `vllm.tasks`: tasks of models."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import GenerationTask, PoolingTask, SupportedTask

__all__ = ["GenerationTask", "PoolingTask", "SupportedTask"]

__getattr__ = absent(__name__)
