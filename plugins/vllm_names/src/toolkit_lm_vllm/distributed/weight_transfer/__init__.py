"""vLLM's `vllm.distributed.weight_transfer`: groups of a trainer and a server, by Gloo."""

from toolkit_lm_vllm_names.absent import absent

__getattr__ = absent(__name__)
