"""From logits to tokens."""

from llm_toolkit.sampling.candidates import Searched, search
from llm_toolkit.sampling.history import TokenHistory
from llm_toolkit.sampling.logprobs import token_logprobs
from llm_toolkit.sampling.processor import LogitsProcessor, ProcessorRow
from llm_toolkit.sampling.processors import ProcessorTable, load_processor
from llm_toolkit.sampling.rows import SamplingRows
from llm_toolkit.sampling.sampler import Sampled, sample
from llm_toolkit.sampling.uniform import uniform

__all__ = [
    "LogitsProcessor",
    "ProcessorRow",
    "ProcessorTable",
    "Sampled",
    "SamplingRows",
    "Searched",
    "TokenHistory",
    "load_processor",
    "sample",
    "search",
    "token_logprobs",
    "uniform",
]
