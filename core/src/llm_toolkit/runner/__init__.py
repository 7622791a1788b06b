"""The runner: model, caches and the persistent batch on one device."""

from llm_toolkit.runner.backends import load_model_class, select_backends
from llm_toolkit.runner.batch import PersistentBatch, StepInputs
from llm_toolkit.runner.memory import free_memory
from llm_toolkit.runner.model_runner import ModelRunner

__all__ = ["ModelRunner", "PersistentBatch", "StepInputs", "free_memory", "load_model_class", "select_backends"]
