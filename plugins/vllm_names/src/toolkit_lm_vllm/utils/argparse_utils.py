"""vLLM's `vllm.utils.argparse_utils`: the parser of flags."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]

__getattr__ = absent(__name__)
