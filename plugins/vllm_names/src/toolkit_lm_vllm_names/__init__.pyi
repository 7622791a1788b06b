from .argument_parser import FlexibleArgumentParser as FlexibleArgumentParser
from .beam_search import (
    BeamSearchOutput as BeamSearchOutput,
    BeamSearchParams as BeamSearchParams,
    BeamSearchSequence as BeamSearchSequence,
)
from .classes import (
    LLM as LLM,
    AsyncLLM as AsyncLLM,
    AsyncLLMEngine as AsyncLLMEngine,
    ClassificationRequestOutput as ClassificationRequestOutput,
    CompletionOutput as CompletionOutput,
    EmbeddingRequestOutput as EmbeddingRequestOutput,
    LLMEngine as LLMEngine,
    PoolingParams as PoolingParams,
    PoolingRequestOutput as PoolingRequestOutput,
    RequestOutput as RequestOutput,
    RequestOutputKind as RequestOutputKind,
    SamplingParams as SamplingParams,
    ScoringRequestOutput as ScoringRequestOutput,
    TextPrompt as TextPrompt,
    TokensPrompt as TokensPrompt,
)
from .engine_args import AsyncEngineArgs as AsyncEngineArgs, EngineArgs as EngineArgs
from .structured_outputs import StructuredOutputsParams as StructuredOutputsParams
