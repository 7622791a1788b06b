"""Executors: how the engine reaches its workers."""

from llm_toolkit.executor.contract import Executor
from llm_toolkit.executor.in_process import InProcessExecutor

__all__ = ["Executor", "InProcessExecutor"]
