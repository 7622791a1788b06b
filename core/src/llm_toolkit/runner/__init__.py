"""The runner: model, caches and the persistent batch on one device."""

from llm_toolkit.runner.batch import PersistentBatch, StepInputs
from llm_toolkit.runner.memory import kv_memory
from llm_toolkit.runner.model_runner import ModelRunner

__all__ = ["ModelRunner", "PersistentBatch", "StepInputs", "kv_memory"]
