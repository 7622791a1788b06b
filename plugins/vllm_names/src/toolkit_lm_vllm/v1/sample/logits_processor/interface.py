"""vLLM's `vllm.v1.sample.logits_processor.interface`: logits processors, as vLLM has them."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.vllm_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    RequestLogitsProcessor,
)

__all__ = [
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "RequestLogitsProcessor",
]

__getattr__ = absent(__name__)
