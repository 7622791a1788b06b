"""vLLM's `vllm.outputs`: outputs of requests."""

from toolkit_lm.outputs import WeightVersionSpan
from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import (
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "WeightVersionSpan",
]

__getattr__ = absent(__name__)
