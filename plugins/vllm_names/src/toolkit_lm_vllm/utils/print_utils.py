"""vLLM's `vllm.utils.print_utils`: embeddings in one line."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.helpers import print_embeddings

__all__ = ["print_embeddings"]

__getattr__ = absent(__name__)
