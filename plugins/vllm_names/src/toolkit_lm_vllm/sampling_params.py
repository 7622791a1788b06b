"""vLLM's `vllm.sampling_params`: sampling parameters."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.beam_search import BeamSearchParams
from toolkit_lm_vllm_names.classes import RequestOutputKind, SamplingParams
from toolkit_lm_vllm_names.structured_outputs import GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

__getattr__ = absent(__name__)
