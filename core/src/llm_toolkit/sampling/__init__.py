"""From logits to tokens."""

from llm_toolkit.sampling.rows import SamplingRows
from llm_toolkit.sampling.sampler import Sampled, sample
from llm_toolkit.sampling.uniform import uniform

__all__ = ["Sampled", "SamplingRows", "sample", "uniform"]
