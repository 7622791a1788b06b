"""From the tensors of a checkpoint to those of the model: renamed, merged and split as transformers
itself does."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import Any

from toolkit_lm.errors import CheckpointError
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key

_STORED_FREQUENCIES = r"rotary_emb\.inv_freq$"


class Conversion:
    """Conversion of one model's checkpoints by the rules of transformers."""

    def __init__(self, model: Any) -> None:
        self._model = model
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        self._renamings = [
            transform for transform in transforms if isinstance(transform, WeightRenaming)
        ]
        self._converters = [
            transform for transform in transforms if not isinstance(transform, WeightRenaming)
        ]
        self._passed_over = re.compile(
            "|".join([*(model._keys_to_ignore_on_load_unexpected or ()), _STORED_FREQUENCIES])
        )

    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors by name, without those that transformers passes over. Raises
        CheckpointError, naming the tensor."""
        known = self._model.state_dict(keep_vars=True)
        converters = {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        collected: dict[str, Any] = {}
        # Experts are stacked in the order of their numbers.
        for name, tensor in sorted(weights, key=lambda weight: dot_natural_key(weight[0])):
            renamed, pattern = self._rename(name, known)
            if pattern is not None:
                converter = collected.setdefault(renamed, copy.deepcopy(converters[pattern]))
                converter.add_tensor(renamed, name, pattern, tensor)
            elif renamed in known or not self._passed_over.search(renamed):
                yield renamed, tensor
        for name in list(collected):
            yield from self._convert(name, collected.pop(name))

    def _rename(self, name: str, known: Any) -> tuple[str, str | None]:
        """The name of the model's tensor that `name` goes into, and the pattern of the converter
        that takes it (None: as it is)."""
        prefix = self._model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, known)
        if renamed not in known and name in known:
            return name, None
        return renamed, pattern

    def _convert(self, name: str, converter: Any) -> Iterator[tuple[str, Tensor]]:
        try:
            converted = converter.convert(name, model=self._model, config=self._model.config)
        except Exception as error:
            raise CheckpointError(
                f"transformers cannot make {name} of {', '.join(converter.source_patterns)}: "
                f"{error}"
            ) from error
        for made, tensor in converted.items():
            yield made, tensor[0] if isinstance(tensor, list) else tensor
