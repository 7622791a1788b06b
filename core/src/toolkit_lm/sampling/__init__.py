"""From logits to tokens."""

from toolkit_lm.sampling.candidates import Searched, search
from toolkit_lm.sampling.history import TokenHistory
from toolkit_lm.sampling.logprobs import token_logprobs
from toolkit_lm.sampling.processor import LogitsProcessor, ProcessorRow
from toolkit_lm.sampling.processors import ProcessorTable, load_processor
from toolkit_lm.sampling.rows import SamplingRows
from toolkit_lm.sampling.sampler import Sampled, sample
from toolkit_lm.sampling.uniform import uniform

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
