"""vLLM's `vllm.v1.sample.logits_processor.builtin`: helpers of logits processors."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.vllm_processors import process_dict_updates

__all__ = ["process_dict_updates"]

__getattr__ = absent(__name__)
