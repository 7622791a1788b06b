"""A checkpoint's feature extractor, and the number of states that an encoder makes of its features.
Needs no torch until a recording comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError

_MASKS = ("attention_mask", "input_features_mask", "padding_mask")
_FEATURES = ("input_features", "input_values")
_MOST_REASON = 200
_WIDTHS = (
    *("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"),
    *("feature_size", "input_dim", "mel_bins", "n_mels"),
)
"""Keys of config.json, and of its parts, that state the numbers of a frame."""
_STACKED = (1, 2, 4)
"""Frames that an extractor may put into one."""
_LONGEST = 2**26
"""Most samples, or frames, that are tried."""


class Extractor:
    """Samples of a recording -> features [frames, width], or [samples], float32. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    @property
    def sampling_rate(self) -> int:
        """Samples a second. Raises CheckpointError where the folder has no feature extractor."""
        with self._lock:
            return int(self._loaded.sampling_rate)

    @cached_property
    def _loaded(self) -> Any:
        from transformers import AutoFeatureExtractor

        try:
            # Reads a folder: nothing is fetched.
            return AutoFeatureExtractor.from_pretrained(  # nosec B615
                str(self._folder), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever its own reader raises
            raise CheckpointError(
                f"{self._folder}: transformers cannot make the feature extractor: {error}"
            ) from error

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Features of samples [N] float32, without padding. Raises RequestError for what it cannot
        read."""
        rate = self.sampling_rate
        try:
            with self._lock:
                made = self._loaded(samples, sampling_rate=rate, return_tensors="pt")
        except (
            Exception
        ) as error:  # whatever an extractor raises, for a short recording for example
            raise RequestError(
                f"the checkpoint's feature extractor cannot read {len(samples)} samples: "
                f"{str(error)[:_MOST_REASON]}",
                "audio",
            ) from error
        found = next((np.asarray(made[key]) for key in _FEATURES if key in made), None)
        if found is None or len(found) != 1:
            raise RequestError(
                "the checkpoint's feature extractor makes several parts of it: cut it into several "
                "recordings.",
                "audio",
            )
        for key in _MASKS:
            if key in made and np.shape(made[key]) == found.shape[:2]:
                found = found[:, : int(np.asarray(made[key]).sum())]
        return np.ascontiguousarray(found[0], np.float32)


class Shapes:
    """Numbers of encoder states, by passes over shapes: the encoder computes no values."""

    def __init__(self, model: Any, encoder: Any) -> None:
        """`model`, and the module of it that reads features [B, ...], on the device "meta"."""
        self.model = model
        self.encoder = encoder
        self.states = lru_cache(4096)(self._states)
        self.step: int = next(
            (part.frame_len for part in encoder.modules() if hasattr(part, "frame_len")), 1
        )
        """Samples of which the encoder reads whole multiples alone."""

    def whole(self, features: np.ndarray) -> np.ndarray:
        """Features of whole multiples of `step`. As the mask of transformers does, it makes the
        rest a step of silence."""
        rest = len(features) % self.step
        if not rest:
            return features
        return np.concatenate([features[:-rest], np.zeros(self.step, np.float32)])

    def _states(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Number and width of the states of features of a shape. Raises whatever transformers
        raises for a shape that it cannot take."""
        import torch

        try:
            with torch.no_grad():
                found = self.encoder(torch.empty(1, *shape, device="meta"))[0]
        except RuntimeError as error:
            count = getattr(self.model, "_get_feat_extract_output_lengths", None)
            if count is None or len(shape) != 1 or "device" not in str(error):
                raise
            return int(count(shape[0])), int(self.model.config.vocab_size)
        if found.ndim != 3 or found.shape[1] < 1:
            raise RuntimeError(f"it makes states {list(found.shape)}")
        return int(found.shape[1]), int(found.shape[2])

    @cached_property
    def frame(self) -> tuple[int, ...]:
        """Shape of a frame of features: () for samples. Raises ValueError where it is unknown."""
        reasons = []
        for frame in ((), *((width,) for width in _widths(self.model.config.to_dict()))):
            try:
                self.states((2**8 if frame else 2**10 * self.step, *frame))
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
            else:
                return frame
        raise ValueError(f"it reads neither samples nor frames: {reasons[-1][:_MOST_REASON]}")

    def example(self, most: int) -> tuple[int, ...]:
        """The shape of features of `most` states or fewer, but as many as may be found. Raises
        ValueError where each has more."""
        low = 0
        high = 1
        while high < _LONGEST and self._count(high) <= most:
            low = high
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            if self._count(middle) <= most:
                low = middle
            else:
                high = middle
        if not low or not self._count(low):
            raise ValueError(f"its encoder makes more than {most} states of any recording")
        return (low * self.step, *self.frame)

    def _count(self, length: int) -> int:
        """States of so many samples or frames; 0: it is too short."""
        try:
            return self.states((length * self.step, *self.frame))[0]
        except Exception:
            return 0


def _widths(values: Mapping[str, Any]) -> Iterator[int]:
    for key, value in values.items():
        if key in _WIDTHS and type(value) is int:
            yield from (value * factor for factor in _STACKED)
        elif isinstance(value, Mapping):
            yield from _widths(value)


def blank_of(config: VllmConfig) -> int:
    """The label of a frame that says nothing. Raises CheckpointError where config.json names
    none."""
    blank = config.hf_config.get("pad_token_id")
    size = config.hf_config.get("vocab_size")
    if type(blank) is not int or not 0 <= blank < (size if isinstance(size, int) else blank + 1):
        raise CheckpointError(f"config.json: the blank, pad_token_id, is {blank!r}.")
    return blank
