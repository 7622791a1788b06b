"""vLLM's `vllm.exceptions`: errors."""

from toolkit_lm.errors import EngineDeadError
from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import VLLMValidationError

__all__ = ["EngineDeadError", "VLLMValidationError"]

__getattr__ = absent(__name__)
