"""Extensions of workers: a class of an application whose methods `collective_rpc` calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from toolkit_lm.errors import ConfigError, RequestError, nearest

if TYPE_CHECKING:
    import torch
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.model import Model
    from torch import Tensor

Stage = Callable[[Iterable[tuple[str, "Tensor"]]], set[str]]
"""Takes tensors of the next weights, by the checkpoint's names, and returns the names."""


class WorkerModel:
    """The model of a worker. Attributes are the model's own, but for `load_weights`."""

    def __init__(self, model: Model, stage: Stage) -> None:
        self._model = model
        self._stage = stage

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes tensors of new weights, whole, by the checkpoint's names. The model has them when
        the call of the extension's method ends. Returns the names."""
        return self._stage(weights)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class ModelRunnerView:
    """The runner of a worker, as far as extensions see it."""

    def __init__(self, model: WorkerModel, device: torch.device) -> None:
        self.model = model
        self.device = device


class ModelConfigView:
    """The config's section of the model, whose `dtype` is torch's, as vLLM has it."""

    def __init__(self, config: VllmConfig) -> None:
        from toolkit_lm.model import torch_dtype

        self._section = config.model
        self.dtype = torch_dtype(config.model.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._section, name)


class Worker:
    """The worker as `self` of an extension's methods: vLLM's attributes of these names."""

    def __init__(self, model: Model, config: VllmConfig, device: Any, stage: Stage) -> None:
        self.rank = config.parallel.rank
        self.local_rank = config.parallel.rank % config.parallel.ranks_per_node
        self.device = device
        self.vllm_config = config
        self.model_config = ModelConfigView(config)
        self.parallel_config = config.parallel
        self.model_runner = ModelRunnerView(WorkerModel(model, stage), device)

    def get_model(self) -> WorkerModel:
        """Alias of `model_runner.model`."""
        return self.model_runner.model


def extension_class(path: str) -> type:
    """Imports the class that an option names. Raises ConfigError."""
    module, mark, name = path.replace(":", ".").rpartition(".")
    if not mark:
        raise ConfigError(
            f"option 'rl.worker_extension_cls': {path!r} is no path of a class, module.Class."
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"option 'rl.worker_extension_cls': {path!r} cannot be imported: {error}."
        ) from error
    if not inspect.isclass(found):
        raise ConfigError(f"option 'rl.worker_extension_cls': {path!r} is no class.")
    return found


class Extension:
    """An instance of the extension's class, which is a worker too."""

    def __init__(self, path: str | None, *arguments: Any) -> None:
        """`path`: the option `rl.worker_extension_cls`. `arguments`: those of Worker. Raises
        ConfigError."""
        self._class = None if path is None else extension_class(path)
        self._arguments = arguments
        self._worker: Worker | None = None
        if self._class is not None and (taken := sorted(set(vars(Worker)) & self._names())):
            raise ConfigError(
                f"option 'rl.worker_extension_cls': {path!r} has {taken[0]!r}, which workers have. "
                "Give the method another name."
            )

    def call(self, method: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Calls a method of the class. Raises RequestError for a method that it lacks, and the
        method's exceptions."""
        if self._class is None:
            raise RequestError(
                f"{method}: the engine has no extension of its workers: set the option "
                "rl.worker_extension_cls.",
                "method",
            )
        if method not in self._names():
            raise RequestError(
                f"{self._class.__name__} has no method {method!r}. "
                f"{nearest(method, self._names())}",
                "method",
            )
        if self._worker is None:
            # Made on first use: an engine's process may only check the option.
            made = type(f"Worker{self._class.__name__}", (Worker, self._class), {})
            self._worker = made(*self._arguments)
        return getattr(self._worker, method)(*arguments, **keywords)

    def _names(self) -> set[str]:
        """Names of the class's public methods."""
        assert self._class is not None
        found = inspect.getmembers(self._class, inspect.isroutine)
        return {name for name, _ in found if not name.startswith("_")}
