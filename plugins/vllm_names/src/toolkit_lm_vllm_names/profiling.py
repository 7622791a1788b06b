"""Profiler: PyTorch's traces of the engine in this process, for `start_profile`."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit_lm.errors import ToolkitError

_FOLDER = "VLLM_TORCH_PROFILER_DIR"


class Profiler:
    """One recording at a time, as a Chrome trace in a folder."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: torch_profiler_dir, else the variable VLLM_TORCH_PROFILER_DIR; steps of the
        engine before the recording (delay_iterations) and in it (max_iterations; 0: all). Raises
        ToolkitError for another profiler than torch's."""
        if (kind := config.get("profiler") or "torch") != "torch":
            raise ToolkitError(f"profiler_config: profiler must be 'torch', not {kind!r}.")
        self._folder: str | None = config.get("torch_profiler_dir")
        self._delay = _steps(config, "delay_iterations")
        self._most = _steps(config, "max_iterations")
        self._num_steps: int | None = None
        """Steps since `start`; None: there was none."""
        self._recording: Any = None
        self._is_running = False
        self._prefix = ""

    def start(self, prefix: str | None) -> None:
        """Begins to record, after the delay. Raises ToolkitError without a folder."""
        if self._num_steps is not None:
            raise ToolkitError("a recording is under way: end it by stop_profile().")
        if self.folder is None:
            raise ToolkitError(
                'give the folder of traces: profiler_config={"torch_profiler_dir": "traces"}, or '
                f"the variable {_FOLDER}."
            )
        self._prefix = prefix or "trace"
        self._num_steps = 0
        self._begin_or_end()

    def after_step(self) -> None:
        """Counts a step of the engine."""
        if self._num_steps is not None:
            self._num_steps += 1
            self._begin_or_end()

    def stop(self) -> None:
        """Ends the recording, and writes it. Raises ToolkitError if nothing is recorded."""
        if self._num_steps is None:
            raise ToolkitError("nothing is recorded: begin by start_profile().")
        num_steps, self._num_steps = self._num_steps, None
        recording, self._recording = self._recording, None
        if recording is None:
            raise ToolkitError(
                f"nothing is recorded: {num_steps} steps were computed, and delay_iterations of "
                f"profiler_config is {self._delay}."
            )
        if self._is_running:
            recording.stop()
            self._is_running = False
        assert self.folder is not None, "a recording has a folder"
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._prefix}_{os.getpid()}_{time.time_ns()}.pt.trace.json"
        recording.export_chrome_trace(str(folder / name))

    def _begin_or_end(self) -> None:
        if self._recording is None and self._num_steps == self._delay:
            self._recording = importlib.import_module("torch.profiler").profile()
            self._recording.start()
            self._is_running = True
        elif self._is_running and self._most and self._num_steps == self._delay + self._most:
            self._recording.stop()
            self._is_running = False

    @property
    def folder(self) -> str | None:
        """The folder of the traces."""
        return self._folder or os.environ.get(_FOLDER)


def _steps(config: Mapping[str, Any], name: str) -> int:
    number = config.get(name) or 0
    if type(number) is not int or number < 0:
        raise ToolkitError(
            f"profiler_config: {name} must be an integer of at least 0, not {number!r}."
        )
    return number
