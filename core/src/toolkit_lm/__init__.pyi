from ._version import __version__ as __version__
from .config import VllmConfig as VllmConfig
from .frontend import LLM as LLM, AsyncLLM as AsyncLLM, LLMEngine as LLMEngine
from .outputs import (
    CompletionOutput as CompletionOutput,
    Logprob as Logprob,
    PoolingOutput as PoolingOutput,
    PoolingRequestOutput as PoolingRequestOutput,
    RequestOutput as RequestOutput,
    RerankResult as RerankResult,
)
from .params import (
    RequestOutputKind as RequestOutputKind,
    SamplingParams as SamplingParams,
)
from .pooling_params import PoolingParams as PoolingParams
from .prompts import (
    ExplicitEncoderDecoderPrompt as ExplicitEncoderDecoderPrompt,
    TextPrompt as TextPrompt,
    TokensPrompt as TokensPrompt,
)
