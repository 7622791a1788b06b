"""The process that `toolkit bench startup` measures: an LLM, one token, and the time at which each
phase was over."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit_lm.executor import InProcessExecutor


class _Clock:
    """Splits time into phases, one after another."""

    def __init__(self, start: float) -> None:
        self.phases: dict[str, float] = {}
        self._last = start

    def end(self, phase: str, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        self.phases[phase] = now - self._last
        self._last = now

    def watch(
        self,
        owner: type[InProcessExecutor],
        method: str,
        *,
        before: str | None = None,
        after: str | None = None,
    ) -> None:
        """Ends phases when a method is called, and when it returns."""
        inner: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.end(before)
            result = inner(*args, **kwargs)
            if after is not None:
                self.end(after)
            return result

        setattr(owner, method, watched)


def main(begun: float) -> None:
    """Arguments: time.monotonic() at which the process was started, and the file of options. Prints
    the phases' seconds as JSON."""
    start, options = sys.argv[1:]
    clock = _Clock(float(start))
    clock.end("interpreter", begun)
    from toolkit_lm import LLM, SamplingParams
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.engine import no_garbage_collection
    from toolkit_lm.plugin import Plugins
    from toolkit_lm_commands.config_file import read_file

    config = VllmConfig.make(**read_file(options))
    plugins = Plugins.load(config.plugins)
    clock.end("plugins and options")
    if not config.engine.engine_process:
        with no_garbage_collection():
            from toolkit_lm.executor import InProcessExecutor

        clock.end("imports (torch and the engine)")
        clock.watch(
            InProcessExecutor,
            "load",
            before="config and checkpoint",
            after="model: import, weights",
        )
        clock.watch(InProcessExecutor, "init_kv_cache", after="KV cache")
        clock.watch(InProcessExecutor, "warm_up", after="warm-up")
    llm = LLM(config=config, plugins=plugins)
    clock.end("engine process" if config.engine.engine_process else "renderer")
    llm.generate(
        {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False
    )
    clock.end("first token")
    llm.close()
    print(json.dumps(clock.phases))
