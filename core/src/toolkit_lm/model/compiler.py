"""The compiler contract: a compiler runs a model's forward pass in the model's place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from toolkit_lm.attention import BatchLimits, GraphSupport
from toolkit_lm.config import VllmConfig
from toolkit_lm.model.contract import IntermediateTensors, Model
from toolkit_lm.plugin import Plugins


class GraphShape(NamedTuple):
    """Shape of the batch that a CUDA graph of a whole forward pass is for. Smaller batches are
    padded to it."""

    num_rows: int
    num_tokens: int
    max_query_len: int
    """Most tokens of a row."""


class ModelCompiler(ABC):
    """Runs the forward pass of one model, equal except for rounding. It is made after the weights
    are loaded, and compiles then."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Returns why it cannot compile a model, on the device and with the ranks that the config
        names; None: it can."""
        return None

    @classmethod
    def describe(
        cls, vllm_config: VllmConfig, supports: Mapping[str, GraphSupport | str]
    ) -> list[str]:
        """Lines about the compiler for `toolkit explain`. `supports`: graph support of the model's
        attention backends, by name. Must not compile."""
        return []

    @abstractmethod
    def __init__(self, model: Model, vllm_config: VllmConfig, plugins: Plugins) -> None:
        """Compiles. `vllm_config` is resolved. Raises ConfigError, or UnsupportedError for a
        forward pass that it cannot compile."""

    @abstractmethod
    def __call__(self, input_ids: Tensor, **arguments: Tensor) -> Tensor | IntermediateTensors:
        """Runs the model's `forward`."""

    def bind(  # noqa: B027
        self, limits: BatchLimits, supports: Mapping[str, GraphSupport | str]
    ) -> None:
        """Called when the layers have a new KV cache. `supports`: graph support of the backends, by
        name."""

    def estimate(self, step: Callable[[], object]) -> int:
        """Bytes on the device that `capture` will take. `step` computes one token, with a small KV
        cache that is soon replaced."""
        return 0

    def capture(self, step: Callable[[], object]) -> None:  # noqa: B027
        """Captures CUDA graphs. `step` computes one token. Called again after a failed step, when
        there is nothing to do."""

    def begin_step(
        self, num_rows: int, num_tokens: int, max_query_len: int, *, whole: bool
    ) -> GraphShape | None:
        """Announces a forward pass of this batch. If a shape is returned, the batch views are
        padded to it, but the arguments are not.

        `whole`: a graph may hold the whole pass, attention included.
        """
        return None

    def seal(self) -> None:  # noqa: B027 - there need be nothing to do
        """The warm-up is over. From now on nothing is compiled: no step waits for a compiler."""


def make_compiler(model: Model, vllm_config: VllmConfig, plugins: Plugins) -> ModelCompiler | None:
    """Makes the compiler of the highest priority that does not refuse the config; None at level 0.
    Raises UnsupportedError if all refuse."""
    if not vllm_config.compilation.optimization_level:
        return None
    registry = plugins.compilers
    name, _ = registry.choose(
        "compile the model",
        lambda entry, by_name: registry.ask(entry.key, vllm_config, by_name=by_name),
    )
    compiler: ModelCompiler = registry.make(name, model, vllm_config, plugins)
    return compiler
