"""Media in prompts: the embeddings that a model's encoders have made, and where they take the place
of tokens'."""

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
"""`StepRun.sequences`."""


class ReadsMedia(Protocol):
    """What a MediaPart asks of its model: where an item of media stands among the tokens,
    embeddings of the item replace theirs.

    The model's `forward` takes `inputs_embeds` [T, H] too, which stand in the place of
    `embed(input_ids)` and may be written to; None: no token is an item's. Where it has
    `prompt_positions(token_ids, features)`, that gives rotary positions [3, N] (int64) of a
    prompt's tokens [N], below N, from its features, which are without their data; those after it go
    on from the greatest, all three alike. None: each token's index.
    """

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens [T], as the decoder goes on with them: those of items stand
        beside them as they are."""

    def encode_items(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        """Embeddings [n, H] of each item of a modality, from its named arrays. What they are does
        not depend on the other items."""

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        """The largest usual item of each modality, which the encoder is warmed up with."""


class MediaPart(StepPart):
    """The items that a worker holds, and the sequences whose prompts have some. The model is one
    that ReadsMedia."""

    asks = ("embed", "encode_items", "example_items")
    feeds = frozenset({"sequences"})

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **given: Any
    ) -> None:
        super().__init__(model, config, device, **given)
        self._prompt_positions = getattr(model, "prompt_positions", lambda tokens, features: None)
        self._has_spans = any(
            layer.spans for layer in model.modules() if isinstance(layer, CacheLayer)
        )
        self._embeds: dict[str, Tensor] = {}
        """By identifier, [n, H]."""
        self._features: dict[int, list[MultiModalFeatureSpec]] = {}
        """By sequence."""
        self._positions: dict[int, np.ndarray] = {}
        """By sequence, [3, N] of its prompt, where the model has such."""
        self._embeds_tokens = config.parallel.pipeline_parallel_rank == 0
        """The first pipeline stage does, for all."""

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
        """Forgets and makes embeddings, as a plan says."""
        if plan.dropped_items or plan.encode:
            with self.model.kernels.step(self.config.scheduler.token_budget):
                self._encode(plan, step.sequences)

    def _encode(self, plan: StepPlan, sequences: EncoderSequences) -> None:
        for name in plan.dropped_items:
            self._embeds.pop(name, None)
        if not self._embeds_tokens:
            return
        items = {
            modality: [one for one in plan.encode if one.modality == modality]
            for modality in {one.modality for one in plan.encode}
        }
        for modality, some in items.items():
            given = [one for one in some if "embeds" in one.data]
            for one in given:
                # Kept in the model's dtype, whatever it came in.
                self._embeds[one.identifier] = self._tensors(one)["embeds"].to(
                    getattr(torch, self.config.model.dtype)
                )
            if made := [one for one in some if "embeds" not in one.data]:
                embeds = self.model.encode_items(
                    modality, [self._tensors(one) for one in made], sequences
                )
                # Of their own memory: an item that is dropped would live on in a view of one that
                # stays.
                own = [
                    one if one.untyped_storage().nbytes() == one.nbytes else one.clone()
                    for one in embeds
                ]
                self._embeds.update(zip((one.identifier for one in made), own, strict=True))

    def _tensors(self, item: EncoderItem) -> dict[str, Tensor]:
        return {
            name: torch.from_numpy(array.to_numpy().copy()).to(self.device)
            for name, array in item.data.items()
        }

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """`inputs_embeds` [T, H] where a row reads media; `positions` [3, T] where a row's follow
        from media."""
        if not self._features:
            return {}
        arguments = {}
        if self._positions:
            arguments["positions"] = torch.from_numpy(self._all_positions(inputs)).to(self.device)
        if self._embeds_tokens and (read := list(self._read(inputs))):
            embeds = self.model.embed(torch.from_numpy(inputs.input_ids).to(self.device))
            for places, rows in read:
                embeds[torch.from_numpy(places).to(self.device)] = rows.to(embeds.dtype)
            arguments["inputs_embeds"] = embeds
        return arguments

    def _read(self, inputs: StepInputs) -> Iterator[tuple[np.ndarray, Tensor]]:
        """For each item of which the step computes tokens: their places in the flat batch, and the
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
        """Of each item that a row reads: the row's place in the step, the row's first token and its
        end, and the item."""
        for index, scheduled in enumerate(inputs.plan.scheduled):
            start = scheduled.start
            end = scheduled.start + scheduled.num_tokens
            for feature in self._features.get(scheduled.seq_id, ()):
                if feature.mm_position.offset < end and start < feature.mm_position.end:
                    yield index, start, end, feature

    def _all_positions(self, inputs: StepInputs) -> np.ndarray:
        positions = np.repeat(inputs.token_index[None], 3, axis=0)
        for index, scheduled in enumerate(inputs.plan.scheduled):
            if (its := self._positions.get(scheduled.seq_id)) is None:
                continue
            tokens = slice(int(inputs.query_start[index]), int(inputs.query_start[index + 1]))
            start = scheduled.start
            length = its.shape[1]
            in_prompt = its[:, start : start + scheduled.num_tokens]
            # After the prompt they go on, one by one.
            positions[:, tokens] += its.max() + 1 - length
            positions[:, tokens.start : tokens.start + in_prompt.shape[1]] = in_prompt
        return positions

    def groups(self, inputs: StepInputs) -> None:
        """Sets `inputs.spans`, where layers ask for them and the step reads media."""
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
