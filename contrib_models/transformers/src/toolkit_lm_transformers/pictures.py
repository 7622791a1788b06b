"""Pictures of a prompt as the forward of a transformers model takes them: arrays by name, for one
sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from toolkit_lm.config import VllmConfig, parse_memory
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import MultiModalFeatureSpec, NewSequence, PlaceholderRange, StepPlan
from toolkit_lm.step import StepInputs, StepPart, StepRun
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_transformers.image_text_rules import TOKENS
from toolkit_lm_transformers.layout import CacheLayout
from toolkit_lm_transformers.sequences import Decoder, read_tokens, write_tokens
from toolkit_lm_transformers.spec import PicturedSpec, TokensSpec

_KEPT = 32
"""Pictures that are kept although the engine has dropped them: a sequence may need its pictures
again that the engine thinks computed."""
_OF_TOKENS = {
    "mm_token_type_ids": torch.long,
    "token_type_ids": torch.long,
    "image_embeds_position_mask": torch.bool,
}
"""Arguments [1, T] that mark the tokens of pictures."""
_BY_PROMPT = ("idefics", "idefics2", "idefics3", "smolvlm")
"""Types whose arrays have the pictures of a prompt on their second axis."""
_PATCH_NUMBERS = "image_token_pooling"
"""Argument of Molmo2, by the patches of all pictures of a prompt."""
_PACKED = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
"""Types whose pixels of all pictures are one row of patches."""


class Picture(NamedTuple):
    """A picture of a sequence."""

    arrays: dict[str, Tensor]
    place: PlaceholderRange


class Reading(NamedTuple):
    """How a model takes pictures."""

    accepted: frozenset[str]
    """Names of arguments."""
    token: int | None
    """The token whose embeddings they replace."""


class PicturesPart(StepPart):
    """Holds the worker's pictures, and hands those of each row to the decoder."""

    def __init__(
        self, model: Any, config: VllmConfig, device: torch.device, **arguments: Any
    ) -> None:
        super().__init__(model, config, device, **arguments)
        self._arrays: dict[str, dict[str, Tensor]] = {}
        self._features: dict[int, list[MultiModalFeatureSpec]] = {}
        """Features of each sequence's prompt, by seq_id."""
        self._dropped: dict[str, None] = {}

    def reserved_bytes(self) -> int:
        return int(parse_memory(self.config.cache.encoder_cache_memory))

    def add(self, seq: NewSequence) -> None:
        if seq.features:
            self._features[seq.seq_id] = seq.features

    def remove(self, seq_id: int) -> None:
        self._features.pop(seq_id, None)

    def begin(self, plan: StepPlan, step: StepRun) -> None:
        for name in plan.dropped_items:
            self._dropped[name] = None
        for item in plan.encode:
            self._dropped.pop(item.identifier, None)
            self._arrays[item.identifier] = {
                name: torch.from_numpy(array.to_numpy().copy()).to(self.device)
                for name, array in item.data.items()
                if name != TOKENS
            }
        if len(self._dropped) <= _KEPT:
            return
        used = {
            feature.mm_identifier for features in self._features.values() for feature in features
        }
        for name in [name for name in self._dropped if name not in used][:-_KEPT]:
            del self._dropped[name]
            self._arrays.pop(name, None)

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        self.model.seeing.pictures = [
            [
                Picture(self._of(feature), feature.mm_position)
                for feature in self._features.get(row.seq_id, ())
                if feature.mm_position.offset < row.start + row.num_tokens
            ]
            for row in inputs.plan.scheduled
        ]
        return {}

    def _of(self, feature: MultiModalFeatureSpec) -> dict[str, Tensor]:
        found = self._arrays.get(feature.mm_identifier)
        if found is None:
            raise UnsupportedError(
                "a picture was dropped that a sequence still needs: the fallback computes pictures "
                "in each step. Raise encoder_cache_memory, or set swap_space to 0."
            )
        return found


class SeeingDecoder(Decoder):
    """A model's forward pass over whole sequences with their pictures: ids [T] -> logits [T, V]."""

    def __init__(
        self,
        layout: CacheLayout,
        hf_config: Any,
        *,
        vllm_config: VllmConfig,
        prefix: str,
        reading: Reading,
    ) -> None:
        super().__init__(layout, hf_config, vllm_config=vllm_config, prefix=prefix)
        assert isinstance(self.spec, TokensSpec)
        self.spec = PicturedSpec(
            block_size=self.spec.block_size,
            widths=self.spec.widths,
            token_bytes=self.spec.token_bytes,
        )
        self.reading = reading
        self.pictures: list[list[Picture]] = []
        """Those of each row of the step, up to its last token."""
        self.rows: list[int] = []
        """Rows of the step that are computed at the moment."""
        self.axis = 1 if hf_config.model_type in _BY_PROMPT else 0
        self.pixel_axis = -1 if hf_config.model_type in _PACKED else self.axis

    def _recompute(
        self, input_ids: Tensor, out: Tensor, start: int, members: list[int], index: Tensor
    ) -> None:
        seeing = [row < len(self.pictures) and bool(self.pictures[row]) for row in members]
        if blind := [place for place, sees in enumerate(seeing) if not sees]:
            rows = [members[place] for place in blind]
            self.rows[:] = rows
            super()._recompute(input_ids, out, start, rows, index[blind])
        for place, row in enumerate(members):
            if seeing[place]:
                self._see(input_ids, out, start, row, index[place : place + 1])

    def _see(self, input_ids: Tensor, out: Tensor, start: int, row: int, index: Tensor) -> None:
        self.rows[:] = [row]
        new = input_ids[index]
        past = [read_tokens(self, [row], start)[torch.float32][..., 0].long()] if start else []
        tokens = torch.cat([*past, new], dim=1)
        found = self._decoded(
            tokens, use_cache=False, **self._arguments(self.pictures[row], tokens, out.dtype)
        )
        out[index] = found[:, start:].to(out.dtype)
        write_tokens(self, index, {torch.float32: new[..., None].float()})

    def _arguments(
        self, pictures: Sequence[Picture], tokens: Tensor, dtype: torch.dtype
    ) -> dict[str, Any]:
        names = {name for picture in pictures for name in picture.arrays}
        # Otherwise the model adds noise to what it hears, another one in each step.
        found: dict[str, Any] = {"sample": False} if "sample" in self.reading.accepted else {}
        for name in sorted(names & self.reading.accepted):
            arrays = [picture.arrays[name] for picture in pictures if name in picture.arrays]
            if name == _PATCH_NUMBERS:
                arrays = numbered([picture.arrays for picture in pictures])
            axis = self.pixel_axis if name == "pixel_values" else self.axis
            whole = joined(arrays, axis % arrays[0].ndim)
            found[name] = whole.to(dtype) if whole.is_floating_point() else whole
        for name, kind in _OF_TOKENS.items():
            if name in self.reading.accepted:
                found[name] = marks(pictures, tokens).to(kind)
        return found


def numbered(pictures: Sequence[dict[str, Tensor]]) -> list[Tensor]:
    """The numbers [n, k] of the patches that each token pools, which go on from picture to picture;
    -1 is none. Pixels are [crops, patches, values]."""
    found = []
    first = 0
    for arrays in pictures:
        numbers = arrays[_PATCH_NUMBERS]
        pixels = arrays["pixel_values"]
        found.append(torch.where(numbers >= 0, numbers + first, numbers))
        first += pixels.shape[0] * pixels.shape[1]
    return found


def joined(arrays: Sequence[Tensor], axis: int) -> Tensor:
    """Arrays of several pictures as one, along `axis`. Other axes grow to the longest, by zeros, as
    processors fill them."""
    first, *others = arrays
    if not others or not first.ndim:
        return first
    sizes = [max(array.shape[i] for array in arrays) for i in range(first.ndim)]
    padded = []
    for array in arrays:
        missing = [0 if i == axis else size - array.shape[i] for i, size in enumerate(sizes)]
        pads = [part for count in reversed(missing) for part in (0, count)]
        padded.append(F.pad(array, pads) if any(missing) else array)
    return torch.cat(padded, dim=axis)


def marks(pictures: Sequence[Picture], tokens: Tensor) -> Tensor:
    """1 where a token [1, T] is a picture's, else 0."""
    found = torch.zeros_like(tokens)
    for picture in pictures:
        place = picture.place
        whole = torch.ones(place.length, dtype=torch.long)
        mask = whole if place.mask is None else torch.tensor(place.mask, dtype=torch.long)
        found[0, place.offset : place.end] = mask.to(found.device)
    return found
