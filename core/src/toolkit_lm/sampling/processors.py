"""Table of the logits processors in use, and of the sequences that use each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.messages import NewSequence, SamplerState
from toolkit_lm.plugin import LogitsProcessorRegistry, PluginWarning
from toolkit_lm.sampling.processor import LogitsProcessor, ProcessorRow, Stage


class ProcessorTable:
    """Makes a processor when a sequence first asks for it, and keeps each plugin's errors to the
    sequence they came up for."""

    def __init__(
        self, registry: LogitsProcessorRegistry, config: VllmConfig, device: torch.device
    ) -> None:
        self._registry = registry
        self._config = config
        self._device = device
        self._order = [
            entry.key for entry in sorted(registry.entries(), key=lambda entry: -entry.priority)
        ]
        self._processors: dict[str, LogitsProcessor] = {}
        self.names: dict[int, list[str]] = {}
        """Names of the processors that a sequence uses, by key."""
        self.errors: dict[int, str] = {}
        """Messages of sequences whose processor failed, by key, until the sequence is removed."""
        self.failed_drafts: set[tuple[int, int]] = set()
        """Key and number of drafts of the positions that a processor failed for in this draw."""

    def add(self, row: ProcessorRow, seq: NewSequence) -> set[Stage]:
        """Registers a sequence that joins the batch. Returns the stages of its processors."""
        names = self.names[row.key] = list(seq.inputs.logits_processors)
        for name, arguments in seq.inputs.logits_processors.items():
            try:
                if name not in self._processors:
                    self._processors[name] = self._make(name)
                self._processors[name].add(row, arguments, seq.sampler_state.get(name, {}))
            except Exception as error:
                self._fail(row, name, error)
        return {self._processors[name].stage for name in names if name in self._processors}

    def _make(self, name: str) -> LogitsProcessor:
        made: LogitsProcessor = self._registry.make(name, self._config, self._device)
        if getattr(made, "stage", None) not in get_args(Stage):
            raise PluginError(f"{type(made).__name__}.stage must be one of {get_args(Stage)}.")
        return made

    def steps(self, key: int) -> bool:
        """Whether drafts of a sequence are verified one after the other."""
        return any(
            not processor.verifies_drafts or _listens(processor)
            for name in self.names[key]
            if (processor := self._processors.get(name)) is not None
        )

    def remove(self, key: int) -> None:
        """Removes a sequence that leaves the batch."""
        self.errors.pop(key, None)
        for name in self.names.pop(key, ()):
            if name in self._processors:
                try:
                    self._processors[name].remove(key)
                except Exception as error:
                    # The sequence has its result already: nobody is to suffer from it.
                    warnings.warn(
                        f"{self._message(name, error)} (in remove)", PluginWarning, stacklevel=2
                    )

    def apply(
        self, values: Tensor, keys: Sequence[int], row: Callable[[int], ProcessorRow], stage: Stage
    ) -> None:
        """Changes logits or probabilities [R, V] float32 in place, those of the rows that use a
        processor of this stage.

        `keys` [R]: whose the rows are. `row` gives one by its index.
        """
        for name in self._order:
            if (
                name in self._processors
                and self._processors[name].stage == stage
                and (users := self._users(name, keys))
            ):
                is_all = len(users) == len(values)
                changed = self._apply(
                    name, values if is_all else values[users], [row(index) for index in users]
                )
                changed = (
                    changed / changed.sum(dim=-1, keepdim=True) if stage == "probs" else changed
                )
                # A copy to itself costs nothing.
                values.copy_(changed) if is_all else values.index_copy_(
                    0, torch.tensor(users, device=values.device), changed
                )

    def begin(self, keys: Sequence[int], row: Callable[[int], ProcessorRow]) -> None:
        """Calls `begin` of the processors before a step that draws for rows [R]."""
        for name, processor in self._processors.items():
            if rows := [row(index) for index in self._users(name, keys)]:
                processor.begin(rows)

    def drafts(
        self, keys: Sequence[int], row: Callable[[int], ProcessorRow]
    ) -> dict[int, list[int]]:
        """Tokens that must follow, by key. Processors that force none are left out."""
        asked = (
            (index, self._processors[name])
            for name in self._processors
            for index in self._users(name, keys)
        )
        return {
            keys[index]: drafts
            for index, processor in asked
            if (drafts := processor.drafts(row(index)))
        }

    def cut(
        self,
        drafts: dict[int, list[int]],
        keys: Sequence[int],
        row: Callable[[int], ProcessorRow],
    ) -> None:
        """Cuts drafts, by key, at the first token that a processor does not allow."""
        for name, processor in self._processors.items():
            if type(processor).num_allowed is LogitsProcessor.num_allowed:
                continue
            for index in self._users(name, keys):
                if tokens := drafts.get(keys[index]):
                    try:
                        # A copy: the list may be the state of whoever drafts.
                        drafts[keys[index]] = tokens[: processor.num_allowed(row(index), tokens)]
                    except Exception as error:
                        self._fail(row(index), name, error)

    def _users(self, name: str, keys: Sequence[int]) -> list[int]:
        """Indices of the rows that use a processor and have not failed."""
        return [
            index
            for index, key in enumerate(keys)
            if name in self.names.get(key, ()) and key not in self.errors
        ]

    def in_logprobs(self, keys: Sequence[int]) -> list[int]:
        """Indices of the rows whose log probabilities are those of changed logits."""
        names = {name for name, processor in self._processors.items() if processor.in_logprobs}
        if not names:
            return []
        return [
            index for index, key in enumerate(keys) if not names.isdisjoint(self.names.get(key, ()))
        ]

    def after_draw(
        self,
        keys: Sequence[int],
        row: Callable[[int], ProcessorRow],
        token_ids: Sequence[int],
        probs: Mapping[int, float],
    ) -> dict[int, SamplerState]:
        """Tells the processors which tokens were drawn. `probs` has the rows that were drawn at
        random. Returns their new states, by row."""
        states: dict[int, SamplerState] = {}
        listening = {
            name: processor for name, processor in self._processors.items() if _listens(processor)
        }
        for index, key in enumerate(keys) if listening else ():
            for name in self.names.get(key, ()):
                processor = listening.get(name)
                if (
                    processor is None
                    or key in self.errors
                    or (processor.stage == "probs" and index not in probs)
                ):
                    continue
                try:
                    state = processor.after_draw(
                        row(index), token_ids[index], probs.get(index, 1.0)
                    )
                except Exception as error:
                    self._fail(row(index), name, error)
                else:
                    if state is not None:
                        states.setdefault(index, {})[name] = dict(state)
        return states

    def _apply(self, name: str, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        """Returns the changed values, which may share the memory of `values`. A row for which the
        processor fails keeps its own."""
        kept = None if self._processors[name].atomic else values.clone()
        try:
            changed = self._processors[name].apply(values, rows)
            if changed.shape != values.shape:
                raise ValueError(
                    f"apply() returned shape {tuple(changed.shape)} for {tuple(values.shape)}"
                )
            # The maximum of NaN is NaN.
            if (
                kept is not None
                and ((changed.amax(dim=-1) < torch.inf) < (kept.amax(dim=-1) < torch.inf)).any()
            ):
                raise ValueError("apply() returned NaN or infinity")
            return changed.to(values.dtype)
        except Exception as error:
            values = values if kept is None else kept
            if len(rows) == 1:
                self._fail(rows[0], name, error)
                return values
        # One of them is the culprit: each by itself.
        return torch.cat(
            [self._apply(name, values[i : i + 1], rows[i : i + 1]) for i in range(len(rows))]
        )

    def _fail(self, row: ProcessorRow, name: str, error: Exception) -> None:
        if row.num_drafts:
            # If the drafts are drawn, the next step comes here again without them.
            self.failed_drafts.add((row.key, row.num_drafts))
        else:
            self.errors.setdefault(row.key, self._message(name, error))

    def _message(self, name: str, error: Exception) -> str:
        # An invalid request is not a fault of the plugin that reports it.
        return (
            str(error)
            if type(error) is RequestError
            else self._registry.get(name).owner.failure(error, f"logits processor {name!r}")
        )


def _listens(processor: LogitsProcessor) -> bool:
    return type(processor).after_draw is not LogitsProcessor.after_draw
