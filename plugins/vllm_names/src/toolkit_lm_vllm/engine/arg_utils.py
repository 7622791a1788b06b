"""vLLM's `vllm.engine.arg_utils`: options of an engine."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.engine_args import AsyncEngineArgs, EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]

__getattr__ = absent(__name__)
