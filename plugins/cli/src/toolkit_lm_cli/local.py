"""A model in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.frontend import LLMEngine
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.plugin import Plugins

from toolkit_lm_cli.sampling import SamplingFlags


class LocalTalker:
    """Runs the engine's loop for one request at a time."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self._engine = LLMEngine.from_config(config, plugins=plugins)
        self._count = 0

    def chat(self, messages: list[dict[str, Any]], flags: SamplingFlags) -> Iterator[str]:
        params = flags.params(**{"max_tokens": None} | self._engine.config.sampling_defaults).replace(output_kind=RequestOutputKind.DELTA)
        self._engine.add_chat(self._next_id(), messages, params)
        return self._stream()

    def complete(self, prompt: str, flags: SamplingFlags) -> Iterator[str]:
        params = flags.params(**self._engine.config.sampling_defaults).replace(output_kind=RequestOutputKind.DELTA)
        self._engine.add_request(self._next_id(), prompt, params)
        return self._stream()

    def close(self) -> None:
        self._engine.shutdown()

    def _next_id(self) -> str:
        self._count += 1
        return str(self._count)

    def _stream(self) -> Iterator[str]:
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    assert isinstance(output, RequestOutput)
                    if output.error:
                        raise RequestError(output.error)
                    yield output.outputs[0].text
        finally:
            self._engine.abort([str(self._count)])
