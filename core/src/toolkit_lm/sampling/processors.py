"""The logits processors that are in use, and whose sequences they serve."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.messages import NewSequence
from toolkit_lm.plugin import LogitsProcessorRegistry, PluginWarning
from toolkit_lm.sampling.processor import LogitsProcessor, ProcessorRow


def load_processor(registry: LogitsProcessorRegistry, name: str) -> type[LogitsProcessor]:
    """The registered class. Raises PluginError where it is none that the sampler could use."""
    kind: type[LogitsProcessor] = registry.load(name)
    if isinstance(getattr(kind, "argmax_invariant", None), bool):
        return kind
    raise PluginError(f"{registry.get(name).owner}: logits processor {name!r} must state argmax_invariant = True or False.")


class ProcessorTable:
    """Makes a processor when a sequence first asks for it, and keeps each plugin's errors to the sequence they came up for."""

    def __init__(self, registry: LogitsProcessorRegistry, config: VllmConfig, device: torch.device) -> None:
        self._registry = registry
        self._config = config
        self._device = device
        self._processors: dict[str, LogitsProcessor] = {}
        self._names: dict[int, list[str]] = {}
        """By key, the processors that a sequence uses."""
        self.errors: dict[int, str] = {}
        """By key, what went wrong for a sequence, until it is removed."""

    def add(self, seq: NewSequence) -> None:
        """A sequence joins the batch."""
        for name, arguments in (seq.params.logits_processors or {}).items():
            self._names.setdefault(seq.seq_id, []).append(name)
            try:
                if name not in self._processors:
                    self._processors[name] = load_processor(self._registry, name)(self._config, self._device)
                self._processors[name].add(seq.seq_id, arguments, seq.token_ids[: seq.num_prompt_tokens])
            except Exception as error:
                self._fail(seq.seq_id, name, error)

    def remove(self, key: int) -> None:
        """A sequence leaves the batch."""
        self.errors.pop(key, None)
        for name in self._names.pop(key, ()):
            if name in self._processors:
                try:
                    self._processors[name].remove(key)
                except Exception as error:
                    # The sequence has its result already: nobody is to suffer from it.
                    warnings.warn(f"{self._message(name, error)} (in remove)", PluginWarning, stacklevel=2)

    def apply(self, logits: Tensor, keys: Sequence[int], row: Callable[[int], ProcessorRow], *, argmax_invariant: bool) -> None:
        """Changes logits [R, V] float32 in place, those of the rows that use a processor of this kind. In the registry's order.

        `keys` [R]: whose the rows are. `row` gives one by its index.
        """
        for name in self._registry:
            processor = self._processors.get(name)
            if processor is None or processor.argmax_invariant != argmax_invariant:
                continue
            users = [index for index, key in enumerate(keys) if name in self._names.get(key, ()) and key not in self.errors]
            if users:
                logits[users] = self._apply(name, logits[users], [row(index) for index in users])

    def users(self, keys: Sequence[int], *, argmax_invariant: bool) -> np.ndarray:
        """Indices of the sequences, of those with these keys, that use a processor of this kind."""
        names = {name for name, one in self._processors.items() if one.argmax_invariant == argmax_invariant}
        return np.array([index for index, key in enumerate(keys) if names.intersection(self._names.get(key, ()))], np.int64)

    def _apply(self, name: str, logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        try:
            changed = self._processors[name].apply(logits.clone(), rows)
            if changed.shape != logits.shape:
                raise ValueError(f"apply() returned shape {tuple(changed.shape)} for {tuple(logits.shape)}")
            return changed
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0].key, name, error)
                return logits
        # One of them is the culprit: each by itself.
        return torch.cat([self._apply(name, logits[i : i + 1], rows[i : i + 1]) for i in range(len(rows))])

    def _fail(self, key: int, name: str, error: Exception) -> None:
        self.errors.setdefault(key, self._message(name, error))

    def _message(self, name: str, error: Exception) -> str:
        return f"logits processor {name!r} of {self._registry.get(name).owner} failed: {type(error).__name__}: {error}"
