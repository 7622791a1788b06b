"""From logits to tokens."""

from toolkit_lm.sampling.batch import SamplingBatch, TokenHistory
from toolkit_lm.sampling.candidates import BeamCandidates, top_candidates
from toolkit_lm.sampling.logprobs import token_logprobs
from toolkit_lm.sampling.processor import LogitsProcessor, ProcessorRow, uniforms
from toolkit_lm.sampling.processors import ProcessorTable
from toolkit_lm.sampling.sampler import Sampled, greedy_sample, sample
from toolkit_lm.sampling.uniform import uniform

__all__ = [
    "LogitsProcessor",
    "ProcessorRow",
    "ProcessorTable",
    "Sampled",
    "SamplingBatch",
    "BeamCandidates",
    "TokenHistory",
    "sample",
    "greedy_sample",
    "top_candidates",
    "token_logprobs",
    "uniform",
    "uniforms",
]
