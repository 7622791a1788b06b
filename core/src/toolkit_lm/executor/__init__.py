"""Executors: how the engine reaches its workers."""

from toolkit_lm.executor.contract import Executor, make_executor
from toolkit_lm.executor.in_process import InProcessExecutor

__all__ = ["Executor", "InProcessExecutor", "make_executor"]
