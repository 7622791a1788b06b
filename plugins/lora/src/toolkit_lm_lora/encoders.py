"""Adapters of what encoders compute: the sequences of an encoder, or items of media."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import StepPlan
from toolkit_lm.model import LinearBase, RMSNorm, Rows
from torch import Tensor, nn

from toolkit_lm_lora.files import AdapterFolder
from toolkit_lm_lora.method import Group
from toolkit_lm_lora.weights import Adapter

Keys = tuple[tuple[str, float], ...]
"""Digests and scales of adapters."""


class EncodedGroup(NamedTuple):
    """Rows of an encoder that have an adapter."""

    adapter: Adapter
    scale: float
    rows: Tensor | None
    """Indices (int64); None: all."""


class EncodedRows:
    """Which adapters the rows of encoders have."""

    def __init__(self, active: Mapping[str, Adapter], device: torch.device) -> None:
        """`active`: the adapters that rows may have, by digest."""
        self.active = active
        self._device = device
        self.groups: list[EncodedGroup] = []
        self.is_running = False
        """Only encoders run at the moment."""
        self._num_tokens: int | None = 0
        """Rows of each call; None: any number."""

    def begin(self, plan: StepPlan, uses: Mapping[int, Keys]) -> None:
        """Begins a step. `uses`: adapters by sequence, which an encoder sequence shares with the
        sequences that read it."""
        self.groups = []
        read = [encoder for encoder in plan.encoders if encoder.input is not None]
        self.is_running = bool(read)
        owners = {seq.encoder_id: seq.seq_id for seq in plan.new if seq.encoder_id is not None}
        own = [uses.get(owners.get(encoder.encoder_id, 0), ()) for encoder in read]
        lengths = [encoder.num_tokens for encoder in read]
        self._num_tokens = sum(lengths)
        for keys in dict.fromkeys(own):
            rows = np.flatnonzero(np.repeat([keys == other for other in own], lengths))
            for digest, scale in keys:
                at = torch.from_numpy(rows).to(self._device)
                is_all = len(rows) == self._num_tokens
                adapter = self.active[digest]
                self.groups.append(EncodedGroup(adapter, scale, None if is_all else at))

    def begin_items(self, keys: Keys) -> None:
        """Begins with items of media that have these adapters."""
        self.is_running = True
        self._num_tokens = None
        self.groups = [EncodedGroup(self.active[digest], scale, None) for digest, scale in keys]

    def end(self) -> None:
        """Ends what `begin_items` has begun."""
        self.is_running = False
        self._num_tokens = 0
        self.groups = []

    def groups_of(self, count: int, layer: str) -> list[Group]:
        """The groups that change a layer, of a call with `count` rows."""
        found = [
            Group(group.adapter.changes, group.scale, group.rows)
            for group in self.groups
            if layer in group.adapter.changes
        ]
        if found:
            self._check(count, layer)
        return found

    def replaced(
        self, path: str, count: int
    ) -> list[tuple[dict[str, Tensor], float, Tensor | None]]:
        """Parameters of a module as in Replacing."""
        found = [
            (group.adapter.modules[path], group.scale, group.rows)
            for group in self.groups
            if path in group.adapter.modules
        ]
        if found:
            self._check(count, path)
        return found

    def _check(self, count: int, name: str) -> None:
        if self._num_tokens not in (None, count):
            raise UnsupportedError(
                f"an adapter changes {name}, which is called for {count} rows, and the encoders of "
                f"the step have {self._num_tokens} tokens: whose they are is not known"
            )


class Encoders:
    """The layers of a model whose rows are not the tokens of the step."""

    def __init__(self, model: Any, layers: Mapping[str, LinearBase]) -> None:
        """`layers`: by prefix."""
        self._model = model
        self._layers = layers
        self.there = any(layer.rows is Rows.ENCODER for layer in layers.values())
        self.has_media = self.there and "media" in model.parts

    def are_changed(self, adapter: Adapter) -> bool:
        """Whether an adapter changes an encoder."""
        changes = adapter.changes
        return any(self._layers[prefix].rows is Rows.ENCODER for prefix in changes) or any(
            map(self._has, adapter.modules)
        )

    def check(self, adapter: Adapter, folder: AdapterFolder) -> None:
        """Raises UnsupportedError for changes of rows that are not known."""
        subject = f"adapter {str(folder.path)!r}"
        paths = {id(module): name for name, module in self._model.named_modules()}
        for prefix in adapter.changes:
            layer = self._layers[prefix]
            if layer.spec.kind == "embedding" and "encoder" in self._model.parts:
                raise UnsupportedError(
                    f"{subject} changes {paths[id(layer)]}: embeddings of models with an encoder "
                    "cannot be adapted."
                )
            if layer.rows is Rows.CACHED:
                raise UnsupportedError(
                    f"{subject} changes {paths[id(layer)]}, which is multiplied by what is cached "
                    "of tokens: whose they are is not known."
                )
        for name in adapter.modules:
            is_norm = isinstance(self._model.get_submodule(name), RMSNorm | nn.LayerNorm)
            if not is_norm and self._has(name):
                raise UnsupportedError(
                    f"{subject} has parameters in the place of those of {name}, which is of an "
                    "encoder. Of encoders, linear layers and norms can be adapted."
                )
        if not self.are_changed(adapter):
            return
        if folder.config.alora_invocation_tokens:
            raise UnsupportedError(
                f"{subject} has alora_invocation_tokens, and changes an encoder, which computes "
                "all of its tokens at a time."
            )
        if self.has_media and not folder.may_change_media:
            raise UnsupportedError(
                f"{subject} changes the encoder of media, and its tensors have names of a language "
                "model."
            )

    def _has(self, path: str) -> bool:
        """Whether the layers around a module are an encoder's."""
        while path and self.there:
            path = path.rpartition(".")[0]
            around = [
                layer.rows is Rows.ENCODER
                for layer in self._model.get_submodule(path).modules()
                if isinstance(layer, LinearBase)
            ]
            if around:
                return all(around)
        return False


class ItemAdapters:
    """Encodes items of media with the adapters of the requests that have them, those of the same
    adapters at a time."""

    def __init__(
        self,
        model: Any,
        rows: EncodedRows,
        encoders: Encoders,
        wrap: Callable[[], None],
    ) -> None:
        """`wrap`: called whenever `rows` have changed."""
        self._encode: Callable[..., list[Tensor]] = model.encode_items
        self._rows = rows
        self._encoders = encoders
        self._wrap = wrap
        self._names: dict[int, list[str]] = {}
        """Identifiers of items, by sequence."""
        self._keys: dict[str, list[Keys]] = {}
        """Adapters of the step's items, by modality."""

    def add(self, seq_id: int, names: Sequence[str]) -> None:
        """Adds a sequence whose prompt has items."""
        self._names[seq_id] = [*names]

    def remove(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._names.pop(seq_id, None)

    def begin(self, plan: StepPlan, uses: Mapping[int, Keys]) -> None:
        """Begins a step. `uses`: adapters by sequence."""
        self._keys = {}
        if not plan.encode:
            return
        of_items = {
            name: tuple(
                key
                for key in uses.get(seq_id, ())
                if self._encoders.are_changed(self._rows.active[key[0]])
            )
            for seq_id, names in self._names.items()
            for name in names
        }
        for item in plan.encode:
            if "embeds" not in item.data:
                keys = of_items.get(item.identifier, ())
                self._keys.setdefault(item.modality, []).append(keys)

    def __call__(
        self, modality: str, items: list[dict[str, Tensor]], sequences: Any
    ) -> list[Tensor]:
        """`encode_items` of the model."""
        keys = self._keys.get(modality, [])
        if not any(keys):
            return self._encode(modality, items, sequences)
        found: dict[int, Tensor] = {}
        for some in dict.fromkeys(keys):
            places = [place for place, own in enumerate(keys) if own == some]
            self._rows.begin_items(some)
            self._wrap()
            embeds = self._encode(modality, [items[place] for place in places], sequences)
            found.update(zip(places, embeds, strict=True))
        self._rows.end()
        self._wrap()
        return [found[place] for place in range(len(items))]
