from ._version import __version__ as __version__
from .config import VllmConfig as VllmConfig
from .frontend import LLM as LLM
from .frontend import AsyncLLM as AsyncLLM
from .frontend import LLMEngine as LLMEngine
from .outputs import (
    ClassificationRequestOutput as ClassificationRequestOutput,
)
from .outputs import (
    CompletionOutput as CompletionOutput,
)
from .outputs import (
    EmbeddingRequestOutput as EmbeddingRequestOutput,
)
from .outputs import (
    Logprob as Logprob,
)
from .outputs import (
    PoolingRequestOutput as PoolingRequestOutput,
)
from .outputs import (
    RequestOutput as RequestOutput,
)
from .outputs import (
    RerankResult as RerankResult,
)
from .outputs import (
    ScoringRequestOutput as ScoringRequestOutput,
)
from .params import SamplingParams as SamplingParams
from .pooling_params import PoolingParams as PoolingParams
from .prompts import TextPrompt as TextPrompt
from .prompts import TokensPrompt as TokensPrompt
