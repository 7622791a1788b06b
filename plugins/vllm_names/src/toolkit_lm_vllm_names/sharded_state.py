"""What each rank has of a model, saved by vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.errors import RequestError

from toolkit_lm_vllm_names.absent import SaysWhatToUse

if TYPE_CHECKING:
    from toolkit_lm import LLM

_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


class ShardedStateLoader:
    """The load format sharded_state, as scripts name it."""

    TP_ONLY_PATTERN = _PATTERN
    PP_AND_TP_PATTERN = _PATTERN
    """The same: ranks are counted over all stages."""


class EngineCore(SaysWhatToUse):
    """An engine's core, as far as scripts call it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Writes what each rank has of the weights into a folder, for load_format="sharded_state".
        Raises RequestError for file names of another pattern than `TP_ONLY_PATTERN`."""
        from toolkit_lm_rl.control import Control

        if pattern not in (None, _PATTERN):
            raise RequestError(f"pattern: files have the names {_PATTERN} here.", "pattern")
        Control(self._llm).save_sharded_state(path, max_size)
