"""vLLM's `vllm.version`: the version."""

from toolkit_lm_vllm_names.absent import absent

__all__ = ["__version__"]

__version__ = "0.32.0"
"""vLLM's version whose names these are: scripts choose by it what they import and call."""

__getattr__ = absent(__name__)
