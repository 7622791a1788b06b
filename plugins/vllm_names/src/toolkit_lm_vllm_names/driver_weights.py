"""Weights that a trainer in the same process gives to an engine, by the path of vLLM's objects:
`llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(pairs)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Stage = Callable[[Iterable[tuple[str, Any]]], None]
"""Takes tensors of the next weights."""


class DriverModel:
    """The model, as far as trainers write it."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Takes tensors of new weights, whole, by the checkpoint's names. The engine changes to all
        that it was given before the next request. Returns the names."""
        names: set[str] = set()

        def named() -> Iterable[tuple[str, Any]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        self._stage(named())
        return names


class DriverRunner:
    """The model runner."""

    def __init__(self, stage: Stage) -> None:
        self.model = DriverModel(stage)


class DriverWorker:
    """The worker of the first rank, which is its wrapper too."""

    def __init__(self, stage: Stage) -> None:
        self.model_runner = DriverRunner(stage)
        self.worker = self


class ModelExecutor:
    """The executor."""

    def __init__(self, llm: Any, stage: Stage) -> None:
        self._llm = llm
        self.driver_worker = DriverWorker(stage)

    def collective_rpc(self, method: str, *arguments: Any, **keywords: Any) -> list[Any]:
        """Alias of `LLM.collective_rpc`."""
        found: list[Any] = self._llm.collective_rpc(method, *arguments, **keywords)
        return found
