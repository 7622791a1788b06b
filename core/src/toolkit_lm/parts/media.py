"""Media in prompts: embeddings from a model's encoders, which replace those of placeholder
tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.messages import Array, EncoderItem, MultiModalFeatureSpec, NewSequence, StepPlan
from toolkit_lm.step import StepInputs, StepPart, StepRun

EncoderSequences = Callable[[Sequence[int]], AbstractContextManager[None]]
"""The type of `StepRun.sequences`."""


class ReadsMedia(Protocol):
    """Interface of a model with a MediaPart. An item's embeddings replace those of its placeholder
    tokens.

    The model's `forward` also takes `inputs_embeds` [T, H], which replace
    `embed_input_ids(input_ids)`. None: no token belongs to an item. The model may have
    `prompt_positions(token_ids, features)`. It returns rotary positions [3, N] (int64), below N, of
    a prompt's tokens [N], from the prompt's features without their data. Later tokens continue from
    the greatest one, all three alike. None: each token's index.
    """

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        """Embeddings [n, H] of each item of a modality, from its named arrays. They must not depend
        on the other items."""

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        """The largest usual item of each modality, for the warm-up of the encoder."""


class MediaPart(StepPart):
    """Holds the worker's items, and the sequences whose prompts have some. The model must satisfy
    ReadsMedia."""

    asks = ("encode_items", "example_items")
    encodes = True
    feeds = frozenset({"sequences"})

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **arguments: Any
    ) -> None:
        super().__init__(model, config, device, **arguments)
        self._prompt_positions = getattr(model, "prompt_positions", lambda tokens, features: None)
        self._has_spans = any(
            layer.spans for layer in model.modules() if isinstance(layer, CacheLayer)
        )
        self._embeds: dict[str, Tensor] = {}
        """Embeddings [n, H] by item identifier."""
        self._features: dict[int, list[MultiModalFeatureSpec]] = {}
        """Features of each sequence's prompt, by seq_id."""
        self._positions: dict[int, np.ndarray] = {}
        """Rotary positions [3, N] of each sequence's prompt, by seq_id, if the model has them."""
        self._embeds_tokens = config.parallel.pipeline_parallel_rank == 0
        """This rank is in the first pipeline stage, which embeds the tokens for all."""

    def reserved_bytes(self) -> int:
        return int(parse_memory(self.config.cache.encoder_cache_memory))

    def example(self, plan: StepPlan) -> None:
        plan.encode = [
            EncoderItem(f"warm-up {number}", modality, data)
            for number, (modality, data) in enumerate(self.model.example_items())
        ]

    def add(self, seq: NewSequence) -> None:
        if not seq.features:
            return
        self._features[seq.seq_id] = seq.features
        prompt = np.array(seq.token_ids[: seq.num_prompt_tokens], np.int64)
        if (positions := self._prompt_positions(prompt, seq.features)) is not None:
            self._positions[seq.seq_id] = positions

    def remove(self, seq_id: int) -> None:
        self._features.pop(seq_id, None)
        self._positions.pop(seq_id, None)

    def begin(self, plan: StepPlan, step: StepRun) -> None:
        """Drops and computes embeddings, as the plan says."""
        if plan.dropped_items or plan.encode:
            with self.model.kernels.step(self.config.scheduler.token_budget):
                self._encode(plan, step.sequences)

    def _encode(self, plan: StepPlan, sequences: EncoderSequences) -> None:
        for name in plan.dropped_items:
            self._embeds.pop(name, None)
        if not self._embeds_tokens:
            return
        items = {
            modality: [item for item in plan.encode if item.modality == modality]
            for modality in {item.modality for item in plan.encode}
        }
        for modality, some in items.items():
            embedded = [item for item in some if "embeds" in item.data]
            for item in embedded:
                # Kept in the model's dtype, whatever the input's was.
                self._embeds[item.identifier] = self._tensors(item)["embeds"].to(
                    getattr(torch, self.config.model.dtype)
                )
            if made := [item for item in some if "embeds" not in item.data]:
                embeds = self.model.encode_items(
                    modality, [self._tensors(item) for item in made], sequences
                )
                # In their own memory: otherwise a dropped item would stay alive through a view of a
                # kept one.
                own = [
                    embed if embed.untyped_storage().nbytes() == embed.nbytes else embed.clone()
                    for embed in embeds
                ]
                self._embeds.update(zip((item.identifier for item in made), own, strict=True))

    def _tensors(self, item: EncoderItem) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array.to_numpy().copy()).to(self.device)
            for name, array in item.data.items()
        }

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Returns `inputs_embeds` [T, H] if a row reads media, and `positions` [3, T] if a row's
        positions depend on media."""
        if not self._features:
            return {}
        arguments = {}
        if self._positions:
            arguments["positions"] = torch.from_numpy(self._all_positions(inputs)).to(self.device)
        if self._embeds_tokens and (read := list(self._read(inputs))):
            embeds = self.model.embed_input_ids(torch.from_numpy(inputs.input_ids).to(self.device))
            for places, rows in read:
                embeds[torch.from_numpy(places).to(self.device)] = rows.to(embeds.dtype)
            arguments["inputs_embeds"] = embeds
        return arguments

    def _read(self, inputs: StepInputs) -> Iterator[tuple[np.ndarray, Tensor]]:
        """Yields, for each item with tokens in the step, their indices in the flat batch and the
        embeddings that belong there."""
        for index, start, end, feature in self._touched(inputs):
            place = feature.mm_position
            first = max(start, place.offset) - place.offset
            last = min(end, place.end) - place.offset
            mask = np.ones(place.length, bool) if place.mask is None else np.array(place.mask, bool)
            before = int(mask[:first].sum())
            own = mask[first:last]
            if not own.any():
                continue
            offset = int(inputs.query_start[index]) + place.offset + first - start
            yield (
                offset + np.flatnonzero(own),
                self._embeds[feature.mm_identifier][before : before + int(own.sum())],
            )

    def _touched(self, inputs: StepInputs) -> Iterator[tuple[int, int, int, MultiModalFeatureSpec]]:
        """Yields, for each item that a row reads: the row's index in the step, the row's first
        token and its end, and the item."""
        for index, scheduled in enumerate(inputs.plan.scheduled):
            start = scheduled.start
            end = scheduled.start + scheduled.num_tokens
            for feature in self._features.get(scheduled.seq_id, ()):
                if feature.mm_position.offset < end and start < feature.mm_position.end:
                    yield index, start, end, feature

    def _all_positions(self, inputs: StepInputs) -> np.ndarray:
        positions = np.repeat(inputs.token_index[None], 3, axis=0)
        for index, scheduled in enumerate(inputs.plan.scheduled):
            if (sequence_positions := self._positions.get(scheduled.seq_id)) is None:
                continue
            tokens = slice(int(inputs.query_start[index]), int(inputs.query_start[index + 1]))
            start = scheduled.start
            length = sequence_positions.shape[1]
            in_prompt = sequence_positions[:, start : start + scheduled.num_tokens]
            # After the prompt, positions increase by one.
            positions[:, tokens] += sequence_positions.max() + 1 - length
            positions[:, tokens.start : tokens.start + in_prompt.shape[1]] = in_prompt
        return positions

    def groups(self, inputs: StepInputs) -> None:
        """Sets `inputs.spans`, if layers ask for them and the step reads media."""
        found = list(self._touched(inputs)) if self._has_spans and self._features else []
        if not found:
            return
        spans = np.stack((inputs.token_index, inputs.token_index + 1), axis=1).astype(np.int32)
        for index, start, end, feature in found:
            place = feature.mm_position
            first = int(inputs.query_start[index]) - start
            replaced = (
                np.ones(place.length, bool) if place.mask is None else np.array(place.mask, bool)
            )
            edges = np.flatnonzero(np.diff(replaced, prepend=False, append=False)) + place.offset
            for begin, stop in edges.reshape(-1, 2).tolist():
                spans[first + max(start, begin) : first + max(start, min(end, stop))] = begin, stop
        inputs.spans = spans
