"""Classes that have other names here."""

from __future__ import annotations

from toolkit_lm import AsyncLLM, PoolingRequestOutput

AsyncLLMEngine = AsyncLLM
EmbeddingRequestOutput = ClassificationRequestOutput = ScoringRequestOutput = PoolingRequestOutput
