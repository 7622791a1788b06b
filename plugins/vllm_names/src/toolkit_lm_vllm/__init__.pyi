from .aliases import install as install
from .engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs
from .engine.async_llm_engine import AsyncLLMEngine as AsyncLLMEngine
from .engine.llm_engine import LLMEngine as LLMEngine
from .entrypoints.llm import LLM as LLM
from .inputs import PromptType as PromptType, TextPrompt as TextPrompt, TokensPrompt as TokensPrompt
from .outputs import (
    ClassificationOutput as ClassificationOutput,
    ClassificationRequestOutput as ClassificationRequestOutput,
    CompletionOutput as CompletionOutput,
    EmbeddingOutput as EmbeddingOutput,
    EmbeddingRequestOutput as EmbeddingRequestOutput,
    PoolingOutput as PoolingOutput,
    PoolingRequestOutput as PoolingRequestOutput,
    RequestOutput as RequestOutput,
    ScoringOutput as ScoringOutput,
    ScoringRequestOutput as ScoringRequestOutput,
)
from .pooling_params import PoolingParams as PoolingParams
from .sampling_params import SamplingParams as SamplingParams

__version__: str
__version_tuple__: tuple[str, ...]
