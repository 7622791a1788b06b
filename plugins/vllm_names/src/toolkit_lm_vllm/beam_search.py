"""vLLM's `vllm.beam_search`: beam searches."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.beam_search import BeamSearchOutput, BeamSearchSequence

__all__ = ["BeamSearchOutput", "BeamSearchSequence"]

__getattr__ = absent(__name__)
