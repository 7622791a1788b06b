"""The program that decodes movies, and recordings in files of their kind, for decoder.py: it is
run, and not imported.

It reads a line of JSON and the file, and answers with a line about it. Then it reads a line with
the indices of frames, and answers with a line and the pixels of each, then a line of an end. Of a
recording it answers with a line and float32 samples, part by part, instead. A line with "refused"
says why there is nothing more.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from typing import Any

_CODECS = (
    "av1",
    "h264",
    "hevc",
    "libdav1d",
    "libvpx",
    "libvpx-vp9",
    "mjpeg",
    "mpeg4",
    "vp8",
    "vp9",
)
_SOUND_CODECS = (
    *("aac", "alac", "flac", "libopus", "libvorbis", "mp3", "mp3float", "opus", "vorbis"),
    *("pcm_f32le", "pcm_s16be", "pcm_s16le", "pcm_s24be", "pcm_s24le"),
)
_BUFFER = 2**20
"""Bytes of the file that are read at a time."""
_MOST_FRAMES = 2**17
_MOST_STREAMS = 16
_LEAST_PIXELS = 2**18
"""That a decoder may have for a frame, since it adds edges to small ones."""


class _RefusedError(Exception):
    """Raised for a fault of the file."""


def main() -> None:
    """Answers two questions."""
    order = json.loads(sys.stdin.buffer.readline())
    bounds = {
        resource.RLIMIT_AS: order["memory"],
        resource.RLIMIT_CPU: order["seconds"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(
            kind, (most, most) if hard == resource.RLIM_INFINITY else (min(most, hard), hard)
        )
    try:
        data = sys.stdin.buffer.read(order["size"])
        is_sound = "most_seconds" in order
        found = (_survey_sound if is_sound else _survey)(data, order)
        _say(found)
        asked = sys.stdin.buffer.readline()
        if asked and is_sound:
            _decode_sound(data, order, found)
        elif asked:
            _decode(data, order, found, json.loads(asked)["indices"])
        if asked:
            _say({})
    except _RefusedError as refused:
        _say({"refused": str(refused)})
    except MemoryError:
        _say({"refused": "it does not fit in memory"})
    except Exception:  # whatever the decoder raises: its errors are many classes
        _say(
            {
                "refused": (
                    "it is a broken or truncated "
                    f"{'recording' if 'most_seconds' in order else 'movie'}"
                )
            }
        )


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _open(data: bytes, order: dict[str, Any]) -> Any:
    import av

    bounds: Any = [{"max_pixels": str(order["max_pixels"])}] * _MOST_STREAMS
    container = av.open(
        io.BytesIO(data),
        format=order["format"],
        container_options={"codec_whitelist": ",".join(_CODECS), "max_streams": str(_MOST_STREAMS)},
        stream_options=bounds,
        buffer_size=_BUFFER,
    )
    if not container.streams.video:
        raise _RefusedError("it has no pictures")
    return container


def _survey(data: bytes, order: dict[str, Any]) -> dict[str, Any]:
    """Survey of a video from its headers and its packets, which are counted but not decoded."""
    with _open(data, order) as container:
        stream = container.streams.video[0]
        width = stream.width
        height = stream.height
        codec = None if stream.codec_context is None else stream.codec_context.name
        if codec not in _CODECS:
            raise _RefusedError("its codec is not read")
        if width * height < 1:
            raise _RefusedError(
                f"its pictures are broken, or of more than the {order['max_pixels']} pixels that "
                "are taken"
            )
        if width * height > order["max_pixels"]:
            raise _RefusedError(
                f"it has {width} x {height} pixels, more than the {order['max_pixels']} that are "
                "taken"
            )
        most = min(_MOST_FRAMES, order["most_decoded"] // (width * height))
        num_packets = num_frames = 0
        last = 0.0
        for packet in container.demux(stream):
            num_packets += packet.size > 0
            num_frames += packet.size > 0 and not packet.is_discard and _is_shown(packet, codec)
            if packet.pts is not None:
                last = max(last, float(packet.pts * packet.time_base))
            if num_frames > most:
                raise _RefusedError(f"it has more than {most} frames of {width} x {height} pixels")
        if num_frames < 1:
            raise _RefusedError("it has no frames")
        if stream.frames > num_packets:
            raise _RefusedError("it is a truncated movie")
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate or 0)
        if not rate and last:
            fps = num_frames / last
        return {"num_frames": num_frames, "fps": fps, "width": width, "height": height}


def _open_sound(data: bytes, order: dict[str, Any]) -> Any:
    import av

    container = av.open(
        io.BytesIO(data),
        format=order["format"],
        container_options={
            "codec_whitelist": ",".join(_SOUND_CODECS),
            "max_streams": str(_MOST_STREAMS),
        },
        buffer_size=_BUFFER,
    )
    if not container.streams.audio:
        raise _RefusedError("it has no sound")
    stream = container.streams.audio[0]
    if stream.codec_context is None or stream.codec_context.name not in _SOUND_CODECS:
        raise _RefusedError("its codec is not read")
    return container


def _survey_sound(data: bytes, order: dict[str, Any]) -> dict[str, Any]:
    """Survey of a sound track from its first samples and its packets, which are counted. A decoder
    may make more samples per second than the header states."""
    with _open_sound(data, order) as container:
        first = next(container.decode(container.streams.audio[0]), None)
        if first is None:
            raise _RefusedError("it has no samples")
        rate = first.sample_rate
        channels = first.layout.nb_channels
    seconds = 0.0
    with _open_sound(data, order) as container:
        for packet in container.demux(container.streams.audio[0]):
            if packet.pts is not None:
                seconds = max(
                    seconds, float((packet.pts + (packet.duration or 0)) * packet.time_base)
                )
            if seconds > order["most_seconds"]:
                break
    return {"rate": rate, "channels": channels, "seconds": seconds}


def _decode_sound(data: bytes, order: dict[str, Any], found: dict[str, Any]) -> None:
    """The mean of the channels. Samples are counted again: packets may lie about them."""
    import av
    import numpy as np

    left = int((order["most_seconds"] + 1) * found["rate"])
    with _open_sound(data, order) as container:
        stream = container.streams.audio[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            if (frame.sample_rate, frame.layout.nb_channels) != (found["rate"], found["channels"]):
                raise _RefusedError("its rate or its channels change on the way")
            left -= frame.samples
            if left < 0:
                raise _RefusedError(
                    f"it has more than the {order['most_seconds']:g} seconds that are taken "
                    "(max_audio_seconds)"
                )
            resampler = av.AudioResampler(
                format="fltp", layout=frame.layout, rate=frame.sample_rate
            )
            for part in [*resampler.resample(frame), *resampler.resample(None)]:
                samples = part.to_ndarray().mean(axis=0, dtype=np.float32)
                _say({"samples": len(samples)})
                sys.stdout.buffer.write(samples.tobytes())
    sys.stdout.buffer.flush()


def _is_shown(packet: Any, codec: str) -> bool:
    """Whether a packet's frame is shown. VP8 has reference frames that are never shown."""
    return codec not in ("vp8", "libvpx") or bool(bytes(packet)[0] & 0x10)


def _decode(data: bytes, order: dict[str, Any], found: dict[str, Any], indices: list[int]) -> None:
    width = found["width"]
    height = found["height"]
    with _open(data, order) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(max(2 * width * height, _LEAST_PIXELS))}
        place = 0
        for number, frame in enumerate(container.decode(stream)):
            if (frame.width, frame.height) != (width, height):
                raise _RefusedError("it is a movie with two sizes")
            if number == indices[place]:
                _give(frame)
                place += 1
            if place == len(indices):
                return
    raise _RefusedError("it is a broken or truncated movie")


def _give(frame: Any) -> None:
    picture = frame.reformat(format="rgb24")
    plane = picture.planes[0]
    width = 3 * picture.width
    _say(
        {"width": picture.width, "height": picture.height, "turns": round(frame.rotation / 90) % 4}
    )
    rows = memoryview(plane)
    for row in range(picture.height):
        sys.stdout.buffer.write(rows[row * plane.line_size : row * plane.line_size + width])
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
