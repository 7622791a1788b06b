"""vLLM's `vllm.v1.engine.exceptions`: errors of the engine."""

from toolkit_lm.errors import EngineDeadError
from toolkit_lm_vllm_names.absent import absent

__all__ = ["EngineDeadError"]

__getattr__ = absent(__name__)
