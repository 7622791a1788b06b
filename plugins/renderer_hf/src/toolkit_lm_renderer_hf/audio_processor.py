"""The checkpoint's feature extractor: transformers' own, of Whisper's features. It is imported with
the first recording."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm_media.audio import BYTES_PER_SAMPLE, RATES

from toolkit_lm_renderer_hf.tokenizer import read_json

logger = logging.getLogger(__name__)

_FILES = ("processor_config.json", "preprocessor_config.json")
_WHISPER = "WhisperFeatureExtractor"
_PACKAGES = (
    "transformers",
    "torch",
    "numpy",
    "soxr",
    "soundfile",
    "toolkit-lm-media",
    "toolkit-lm-renderer-hf",
)
"""Packages whose version may change the numbers of a feature."""
_DEFAULTS = {
    "feature_size": 80,
    "sampling_rate": 16000,
    "hop_length": 160,
    "chunk_length": 30,
    "n_fft": 400,
}
"""Defaults of transformers' WhisperFeatureExtractor."""
_MOST = {
    "feature_size": 2**10,
    "sampling_rate": RATES[1],
    "hop_length": 2**14,
    "chunk_length": 2**12,
    "n_fft": 2**14,
}
_MOST_SAMPLES = 2**25
_MOST_FEATURES = 2**24
"""Largest number of features in one window."""
_BYTES_PER_BIN = 16
"""Bytes of memory per frequency of a frame while features are computed."""


@dataclass(frozen=True)
class Window:
    """The output size of a feature extractor for one recording, read from the checkpoint's JSON."""

    kind: str
    """Its class."""
    num_mels: int
    sampling_rate: int
    """Samples a second."""
    hop: int
    """Samples from frame to frame."""
    seconds: int
    fft_size: int

    @classmethod
    def read(cls, folder: Path) -> Window:
        """Raises CheckpointError where the folder does not say it, or for numbers that would make
        features of any size."""
        stated = cls._stated(folder)
        found = {
            name: default if stated.get(name) is None else stated[name]
            for name, default in _DEFAULTS.items()
        }
        for name, number in found.items():
            if type(number) is not int or not 0 < number <= _MOST[name]:
                raise CheckpointError(
                    f"{folder}: the feature extractor's {name} is {number!r:.50}; it may be from "
                    f"1 to {_MOST[name]}."
                )
        window = cls(
            kind=str(stated.get("feature_extractor_type", _WHISPER)),
            num_mels=found["feature_size"],
            sampling_rate=found["sampling_rate"],
            hop=found["hop_length"],
            seconds=found["chunk_length"],
            fft_size=found["n_fft"],
        )
        if (
            window.num_samples > _MOST_SAMPLES
            or window.num_mels * window.num_frames > _MOST_FEATURES
            or stated.get("dither")
        ):
            raise CheckpointError(
                f"{folder}: the feature extractor's numbers make no sense for a window of "
                f"speech: {window}."
            )
        return window

    @staticmethod
    def _stated(folder: Path) -> Mapping[str, Any]:
        """The feature extractor's settings: a part of processor_config.json, else a file of its
        own. Transformers reads them in the same order."""
        nested = read_json(folder / _FILES[0]).get("feature_extractor")
        stated = nested if isinstance(nested, Mapping) else read_json(folder / _FILES[1])
        if not stated:
            raise CheckpointError(
                f"{folder} has neither {' nor '.join(_FILES)}, which say how recordings are "
                "processed."
            )
        return stated

    @property
    def num_samples(self) -> int:
        return self.seconds * self.sampling_rate

    @property
    def num_frames(self) -> int:
        return self.num_samples // self.hop

    @property
    def made(self) -> int:
        """Bytes of what is made of a recording."""
        return 4 * (self.num_mels + 1) * self.num_frames

    @property
    def read_bytes(self) -> int:
        """Extra bytes that a recording takes while it is read."""
        return BYTES_PER_SAMPLE * self.num_samples + _BYTES_PER_BIN * self.num_frames * (
            self.fft_size // 2 + 1
        )


class AudioProcessor:
    """Makes arrays of recordings, one at a time. Thread-safe. Raises CheckpointError where the
    folder does not say how."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self.window = Window.read(folder)
        if importlib.util.find_spec("transformers") is None:
            raise CheckpointError(
                "recordings need transformers: pip install 'toolkit-lm-renderer-hf[multimodal]'."
            )
        self.fingerprint = _fingerprint([folder / name for name in _FILES])
        """Digest of everything that decides which arrays a recording becomes."""

    def require_known(self) -> None:
        """Raises RequestError for a checkpoint whose features are not Whisper's."""
        if self.window.kind != _WHISPER:
            problem = (
                "this renderer makes Whisper's features of recordings, and the checkpoint names "
                f"{self.window.kind!r:.100}"
            )
            raise RequestError(f"{problem}. Give audio_embeds.")

    def require_room(self, seconds: float) -> None:
        """Raises RequestError for a recording that is longer than a window: what is after it would
        not be heard."""
        if seconds > self.window.seconds:
            raise RequestError(
                f"it has {seconds:.2f} seconds, and the model hears {self.window.seconds} at a "
                "time: cut it into several."
            )

    def process(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of samples [N] float32, at the window's rate: `input_features` [1, mels,
        frames] float32, and `feature_attention_mask` [1, frames] int32, which is 0 in the silence
        after them.
        """
        made = self._loaded(
            samples[: self.window.num_samples],
            sampling_rate=self.window.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="np",
        )
        features = np.asarray(made["input_features"], np.float32)
        mask = np.asarray(made["attention_mask"], np.int32)
        return {
            "input_features": np.ascontiguousarray(features),
            "feature_attention_mask": np.ascontiguousarray(mask),
        }

    @property
    def _loaded(self) -> Any:
        with self._lock:
            return self._extractor

    @cached_property
    def _extractor(self) -> Any:
        from transformers import WhisperFeatureExtractor

        window = self.window
        logger.info("Recordings are processed by %s.", _WHISPER)
        return WhisperFeatureExtractor(
            feature_size=window.num_mels,
            sampling_rate=window.sampling_rate,
            hop_length=window.hop,
            chunk_length=window.seconds,
            n_fft=window.fft_size,
        )


def _fingerprint(paths: list[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    for package in _PACKAGES:
        digest.update(f"{package}={_version(package)};".encode())
    return digest.digest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
