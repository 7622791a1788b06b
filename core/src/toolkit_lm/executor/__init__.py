"""Executors: how the engine reaches its workers."""

from toolkit_lm.executor.contract import Executor
from toolkit_lm.executor.in_process import InProcessExecutor

__all__ = ["Executor", "InProcessExecutor"]
