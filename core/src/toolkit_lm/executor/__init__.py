"""Executors: how the engine reaches its workers."""

from toolkit_lm.executor.contract import Executor, make_executor
from toolkit_lm.executor.failure import Failure
from toolkit_lm.executor.in_process import InProcessExecutor

__all__ = ["Executor", "Failure", "InProcessExecutor", "make_executor"]
