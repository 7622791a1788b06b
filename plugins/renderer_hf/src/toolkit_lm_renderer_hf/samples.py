"""Recordings in memory, as callers give them: arrays of numpy or torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm_media.audio import RATES


def read_samples(source: Any, sampling_rate: int, max_seconds: float) -> tuple[int, np.ndarray]:
    """Samples a second, and the samples: float32 [N], of one channel, from -1 to 1 where they were
    integers. Raises RequestError.

    `source`: samples at `sampling_rate`, or a pair of samples and how many there are in a second.
    """
    samples, rate = source if is_with_rate(source) else (source, sampling_rate)
    if hasattr(samples, "detach"):
        # A tensor, without an import of torch.
        samples = samples.detach().cpu().numpy()
    if not isinstance(samples, np.ndarray):
        form = "an array of samples, or a pair of these and how many there are in a second"
        raise RequestError(
            f"it must be a URL, bytes of a file, or {form}; not a {type(samples).__name__}."
        )
    if samples.ndim != 1 or samples.dtype.kind not in "fi":
        raise RequestError(
            f"its samples must be floats or integers [N], of one channel, not {samples.dtype} "
            f"{list(samples.shape)}."
        )
    if not RATES[0] <= rate <= RATES[1] or int(rate) != rate:
        raise RequestError(
            f"it has {rate} samples a second; {RATES[0]:,} to {RATES[1]:,} are read."
        )
    if not len(samples):
        raise RequestError("it has no samples.")
    if len(samples) > max_seconds * rate:
        raise RequestError(
            f"it has {len(samples) / rate:.2f} seconds, more than the {max_seconds:g} that are "
            "taken (max_audio_seconds)."
        )
    made = samples.astype(np.float32)
    if samples.dtype.kind == "i":
        made /= np.float32(np.iinfo(samples.dtype).max)
    if not np.isfinite(made).all():
        raise RequestError("its samples are not finite numbers.")
    return int(rate), made


def is_with_rate(source: Any) -> bool:
    """Whether it is one recording's samples, and how many there are in a second; no list of
    recordings."""
    return (
        isinstance(source, tuple)
        and len(source) == 2
        and isinstance(source[1], int | float)
        and not isinstance(source[1], bool)
    )
