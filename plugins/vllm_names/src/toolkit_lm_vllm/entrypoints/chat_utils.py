"""vLLM's `vllm.entrypoints.chat_utils`: messages."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import ChatCompletionMessageParam, load_chat_template

__all__ = ["ChatCompletionMessageParam", "load_chat_template"]

__getattr__ = absent(__name__)
