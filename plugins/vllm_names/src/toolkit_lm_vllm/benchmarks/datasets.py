"""vLLM's `vllm.benchmarks.datasets`: prompts of random tokens."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.samples import SampleRequest, add_dataset_parser, get_samples

__all__ = ["SampleRequest", "add_dataset_parser", "get_samples"]

__getattr__ = absent(__name__)
