"""Logits processors of vLLM's form: their base classes, and the processor of ours that runs
them."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from toolkit_lm import sampling
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.params import OF_THE_REQUEST
from torch import Tensor

from toolkit_lm_vllm_names.arguments import PLUGIN
from toolkit_lm_vllm_names.config_view import ConfigView
from toolkit_lm_vllm_names.values import parsed

State = TypeVar("State")
RequestLogitsProcessor = Callable[..., Tensor]
"""A function (output ids, logits [V]) or (prompt ids, output ids, logits [V]) -> logits [V]."""


class MoveDirectionality(Enum):
    """Kind of a move in a batch."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


class BatchUpdate(NamedTuple):
    """Changes of a batch: indices that went, (index, params, prompt ids, output ids) that
    came, (from, to, direction) that moved, in this order."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, Any, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class RequestArguments:
    """The `params` that a logits processor reads of a request: `extra_args` alone."""

    def __init__(self, extra_args: dict[str, Any] | None) -> None:
        self.extra_args = extra_args

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a logits processor of vLLM's form reads extra_args of a request, and no {name!r}: "
            "give it there."
        )


class LogitsProcessor(ABC):
    """Base class of logits processors for a whole batch, as in vLLM."""

    @classmethod  # noqa: B027 # most have no arguments
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for bad arguments."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Takes the engine's config, the device and whether host memory is pinned."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token stays the likeliest."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Takes what has changed in the batch; None: nothing but the output tokens."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The changed logits, [R, V]."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Base class of logits processors that are a function per request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: Any) -> RequestLogitsProcessor | None:
        """The function of a request; None: it has none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Implements the method of this name."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: Tensor) -> Tensor:
        """Implements the method of this name."""
        for index, function in self.req_info.items():
            logits[index] = function(logits[index])
        return logits

    def _bound(
        self, params: Any, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        return partial(function, *([prompt_ids] if takes_prompt else []), output_ids)


def process_dict_updates(
    entries: dict[int, State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[Any, list[int] | None, list[int]], State | None],
) -> bool:
    """Brings states by index up to date. Returns whether one has changed. `new_state`: None for a
    request without one."""
    if batch_update is None:
        return False
    before = dict(entries)
    for index in batch_update.removed:
        entries.pop(index, None)
    for index, params, prompt_ids, output_ids in batch_update.added:
        entries.pop(index, None)
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            entries[index] = state
    for first, second, direction in batch_update.moved:
        moved = entries.pop(first, None)
        replaced = entries.pop(second, None)
        if moved is not None:
            entries[second] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            entries[first] = replaced
    return entries != before


class _Sequence(NamedTuple):
    """The processors of one sequence, each with a batch of its own, of one row."""

    processors: list[LogitsProcessor]
    output_ids: list[int]


class VllmProcessors(sampling.LogitsProcessor):
    """Runs the classes of the plugin's option on the sequences whose requests give `vllm_xargs`.

    A sequence has instances of its own, so that no batch can change what they do.
    """

    stage = "logits"

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        """Raises PluginError for a path without such a class."""
        super().__init__(config, device)
        options = config.plugins.plugin_option.get(PLUGIN, {})
        paths = parsed(options.get("logits_processors", []))
        self._classes = [_loaded(path) for path in ([paths] if isinstance(paths, str) else paths)]
        self._sequences: dict[int, _Sequence] = {}

    def add(
        self, row: sampling.ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        """Implements the method of this name."""
        if not self._classes:
            raise RequestError(
                f"{OF_THE_REQUEST} have vllm_xargs, and this engine has no logits processor of "
                "vLLM's form: its option logits_processors names them.",
                "vllm_xargs",
            )
        params = RequestArguments(dict(arguments["vllm_xargs"]) or None)
        prompt = row.token_ids[: row.num_prompt_tokens].tolist()
        output_ids = _output_ids(row)
        processors = []
        for kind in self._classes:
            try:
                kind.validate_params(params)
            except ValueError as error:
                raise RequestError(f"{OF_THE_REQUEST}: {error}", "vllm_xargs") from error
            processor = kind(ConfigView(self.config), self.device, False)
            processor.update_state(BatchUpdate(1, [], [(0, params, prompt, output_ids)], []))
            processors.append(processor)
        self._sequences[row.key] = _Sequence(processors, output_ids)

    def remove(self, key: int) -> None:
        """Implements the method of this name."""
        self._sequences.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[sampling.ProcessorRow]) -> Tensor:
        """Implements the method of this name."""
        for index, row in enumerate(rows):
            sequence = self._sequences[row.key]
            sequence.output_ids[:] = _output_ids(row)
            for processor in sequence.processors:
                processor.update_state(None)
                values[index : index + 1] = processor.apply(values[index : index + 1])
        return values


def _output_ids(row: sampling.ProcessorRow) -> list[int]:
    found: list[int] = row.token_ids[row.num_prompt_tokens :].tolist()
    return found


def _loaded(path: str) -> type[LogitsProcessor]:
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"logits processor {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise PluginError(
            f"logits processor {path!r} must be a class derived from vLLM's LogitsProcessor."
        )
    return found
