"""Recordings, written by libsndfile and FFmpeg."""

from __future__ import annotations

import io
import os

import av
import numpy as np
import soundfile


def cpu_seconds() -> float:
    """CPU seconds of this process and of its ended children."""
    return sum(os.times()[:4])


def tone(
    seconds: float = 1.0, rate: int = 16000, hertz: float = 440.0, channels: int = 1
) -> np.ndarray:
    """Samples [N, channels]."""
    samples = 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)
    return np.repeat(samples[:, None], channels, axis=1)


def sound(
    format: str = "WAV", seconds: float = 1.0, rate: int = 16000, channels: int = 1, **options: str
) -> bytes:
    """A file."""
    return encoded(tone(seconds, rate, channels=channels), format, rate, **options)


def encoded(samples: np.ndarray, format: str = "WAV", rate: int = 16000, **options: str) -> bytes:
    """`samples` [N] or [N, channels], in a file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, **options)
    return file.getvalue()


def recorded(
    container: str,
    codec: str,
    rate: int,
    seconds: float = 2.0,
    *,
    channels: int = 1,
    pictures: bool = False,
    **options: str,
) -> bytes:
    """A tone of 440 Hz."""
    file = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    samples = (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)).astype(
        np.float32
    )
    with av.open(file, "w", format=container, options=options) as output:
        if pictures:
            movie = output.add_stream("libvpx" if container == "webm" else "mpeg4", rate=5)
            movie.width = movie.height = 32
            movie.pix_fmt = "yuv420p"
        stream = output.add_stream(codec, rate=rate)
        stream.layout = layout
        if pictures:
            for number in range(10):
                picture = av.VideoFrame.from_ndarray(
                    np.full((32, 32, 3), 20 * number, np.uint8), format="rgb24"
                )
                output.mux(movie.encode(picture))
            output.mux(movie.encode(None))
        frame = av.AudioFrame.from_ndarray(
            np.repeat(samples[None], channels, axis=0), format="fltp", layout=layout
        )
        frame.sample_rate = rate
        for part in [
            *av.AudioResampler(format=stream.format, layout=layout, rate=rate).resample(frame)
        ]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))
    return file.getvalue()
