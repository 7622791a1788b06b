"""On each worker: adapters, those that hold slots, and whose rows are whose."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Raw, msgpack
from safetensors.torch import load
from toolkit_lm.attention import slots
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import NewSequence, StepPlan
from toolkit_lm.model import LinearBase, Rows
from toolkit_lm.step import StepInputs, StepPart, StepRun, worker_method
from torch import Tensor

from toolkit_lm_lora_like.method import Delta, LoraMethod

Adapter = dict[str, list[Delta]]
"""By the name of a layer, what changes its outputs."""


class LoraPart(StepPart):
    """The file of an adapter has `LAYER.lora_A` [rank, inputs] and `LAYER.lora_B` [outputs, rank]
    for the layers that it changes, by the checkpoint's names: parts of a fused one, the head, an
    expert's projection."""

    buffers = {"like_slots": ("token", torch.int64)}

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        if self.config.parallel.pipeline_parallel_size > 1:
            raise UnsupportedError("lora_like runs in one pipeline stage.")
        layers = [one for one in self.model.modules() if isinstance(one, LinearBase)]
        self._layers = {one.prefix: one for one in layers}
        self._sources = {
            source: (one, place)
            for one in layers
            if one.spec.kind != "embedding"
            for place, source in enumerate(one.spec.sources)
        }
        self._wrapped: set[str] = set()
        """Layers that an adapter has changed: others are called as if there were no adapters."""
        self._digests_of: dict[str, str] = {}
        """By name, of the adapters that are loaded."""
        self._adapters: dict[str, Adapter] = {}
        """By digest."""
        self._has_news = False
        self._slots: dict[int, Adapter] = {}
        self._slot_of: dict[str, int] = {}
        """By digest, from 1 on."""
        self._digests: dict[int, str] = {}
        """By sequence."""
        self.used: list[int] = []
        """Slots of the step that runs."""
        self._sampled = torch.zeros(0, dtype=torch.int64)
        for name in self.options.adapters:
            self.load_adapter(name)

    @worker_method
    def load_adapter(self, name: str) -> str:
        """Loads an adapter of the folder, or its new contents. Returns their digest."""
        folder = Path(self.options.folder)
        names = sorted(path.stem for path in folder.glob("*.safetensors"))
        if name not in names:
            raise ValueError(f"there is no adapter {name!r}. There are: {', '.join(names)}.")
        contents = (folder / f"{name}.safetensors").read_bytes()
        adapter = self._cut(load(contents))
        digest = hashlib.sha256(contents).hexdigest()
        self._forget(name)
        self._digests_of[name] = digest
        self._adapters[digest] = adapter
        for layer in adapter.keys() - self._wrapped:
            self._wrapped.add(layer)
            self._layers[layer].wrap(partial(LoraMethod, part=self, layer=layer))
        return digest

    @worker_method
    def unload_adapter(self, name: str) -> None:
        """Requests that run with it go on; those that wait end with an error."""
        if name not in self._digests_of:
            there = ", ".join(sorted(self._digests_of)) or "none"
            raise ValueError(f"no adapter {name!r} is loaded. Loaded are: {there}.")
        self._forget(name)

    def _forget(self, name: str) -> None:
        self._has_news = True
        digest = self._digests_of.pop(name, None)
        if digest is not None and digest not in self._digests_of.values():
            del self._adapters[digest]

    def _cut(self, tensors: Mapping[str, Tensor]) -> Adapter:
        """This rank's share of an adapter: of the layer's inputs in A, of its outputs in B."""
        adapter: Adapter = {}
        for source in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
            if source not in self._sources:
                raise ValueError(f"the model has no layer {source!r}")
            layer, place = self._sources[source]
            spec = layer.spec
            inputs = spec.inputs
            outputs = spec.outputs[place]
            low, high = (tensors[f"{source}.lora_{one}"] for one in "AB")
            if low.shape[1] != inputs.full or high.shape != (outputs.full, len(low)):
                raise ValueError(
                    f"{source}: A {tuple(low.shape)} and B {tuple(high.shape)} change no layer of "
                    f"{inputs.full} inputs and {outputs.full} outputs"
                )
            share = high.new_zeros(outputs.size, len(low))
            own = high[outputs.start : outputs.start + outputs.size]
            # A vocabulary is padded to a multiple of the ranks.
            share[: len(own)] = own
            start = sum(part.size for part in spec.outputs[:place])
            adapter.setdefault(layer.prefix, []).append(
                Delta(
                    slice(start, start + outputs.size),
                    low[:, inputs.start : inputs.start + inputs.size]
                    .to(self.device, spec.dtype)
                    .contiguous(),
                    share.to(self.device, spec.dtype),
                )
            )
        return adapter

    def facts(self) -> Raw:
        return self._news()

    def _news(self) -> Raw:
        self._has_news = False
        return Raw(msgpack.encode({"available": list(self._adapters), "loaded": []}))

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        told = plan.parts.get("like")
        if told is None:
            return self._news() if self._has_news else None
        loaded = []
        for slot, digest in msgpack.decode(told):
            # It may have been unloaded meanwhile, which the planner hears now.
            if digest in self._adapters:
                self._slot_of = {its: one for its, one in self._slot_of.items() if one != slot}
                self._slot_of[digest] = slot
                self._slots[slot] = self._adapters[digest]
                loaded.append(digest)
        self._has_news = False
        return Raw(msgpack.encode({"available": list(self._adapters), "loaded": loaded}))

    def add(self, seq: NewSequence) -> None:
        if (share := seq.inputs.parts.get("like")) is not None:
            self._digests[seq.seq_id] = msgpack.decode(share)[1]

    def remove(self, seq_id: int) -> None:
        self._digests.pop(seq_id, None)

    def context(self, inputs: StepInputs, buffers: Mapping[str, np.ndarray]) -> None:
        of_rows = np.array(
            [
                self._slot_of[self._digests[row.seq_id]] if row.seq_id in self._digests else 0
                for row in inputs.plan.scheduled
            ],
            np.int64,
        )
        buffers["like_slots"][:] = np.repeat(of_rows, inputs.num_tokens)
        self.used = sorted({*of_rows.tolist()} - {0})
        lasts = inputs.query_start[1:][inputs.sampling] - 1
        self._sampled = torch.from_numpy(lasts.astype(np.int64)).to(self.device)

    def slots_of(self, rows: Rows | Tensor, count: int) -> Tensor:
        """[count] the slot of each row that a layer is given; 0: none."""
        if rows is Rows.FLAT:
            return slots("like_slots")[:count]
        return slots("like_slots")[self._sampled if rows is Rows.SAMPLED else rows]

    def deltas(self, slot: int, layer: str) -> list[Delta]:
        """What an adapter changes in a layer."""
        return self._slots[slot].get(layer, [])
