"""vLLM's `vllm.tokenizers`: tokenizers."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import get_tokenizer

__all__ = ["get_tokenizer"]

__getattr__ = absent(__name__)
