"""vLLM's `vllm.engine.protocol`: the engine as a server sees it."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.engines import EngineClient

__all__ = ["EngineClient"]

__getattr__ = absent(__name__)
