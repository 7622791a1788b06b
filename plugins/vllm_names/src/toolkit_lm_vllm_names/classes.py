"""Classes that have other names here."""

from __future__ import annotations

from toolkit_lm import PoolingRequestOutput
from toolkit_lm_async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM
EmbeddingRequestOutput = ClassificationRequestOutput = ScoringRequestOutput = PoolingRequestOutput
