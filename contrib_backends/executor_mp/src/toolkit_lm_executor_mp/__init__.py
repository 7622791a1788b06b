"""Tensor and pipeline parallel: a process per rank."""

from __future__ import annotations

from toolkit_lm.plugin import ExecutorRegistry, hookimpl


@hookimpl
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    executors.add("mp", "toolkit_lm_executor_mp.executor:MpExecutor")
