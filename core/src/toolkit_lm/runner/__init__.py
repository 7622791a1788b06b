"""The runner: model, caches and the persistent batch on one device."""

from toolkit_lm.runner.backends import (
    cache_layers,
    graph_supports,
    load_model_class,
    select_backends,
)
from toolkit_lm.runner.batch import PersistentBatch, StepBuffers
from toolkit_lm.runner.device import on_device
from toolkit_lm.runner.memory import free_memory
from toolkit_lm.runner.model_runner import ModelRunner
from toolkit_lm.runner.warm_up import profile, warm_up

__all__ = [
    "ModelRunner",
    "PersistentBatch",
    "StepBuffers",
    "cache_layers",
    "free_memory",
    "graph_supports",
    "load_model_class",
    "on_device",
    "profile",
    "select_backends",
    "warm_up",
]
