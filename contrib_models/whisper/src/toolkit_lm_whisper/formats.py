"""Transcripts as text: txt, srt, vtt, json, and the bodies of OpenAI's API."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from toolkit_lm_whisper.long_form import Segment, Transcript


def _txt(found: Transcript) -> str:
    return found.text + "\n"


def _srt(found: Transcript) -> str:
    parts = enumerate(found.segments, 1)
    return "".join(
        f"{i}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text.strip()}\n\n"
        for i, s in parts
    )


def _vtt(found: Transcript) -> str:
    return "WEBVTT\n\n" + "".join(
        f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{s.text.strip()}\n\n"
        for s in found.segments
    )


def _json(found: Transcript) -> str:
    segments = [
        {"start": round(s.start, 2), "end": round(s.end, 2), "text": s.text, "tokens": s.token_ids}
        for s in found.segments
    ]
    whole = {
        "text": found.text,
        "language": found.language,
        "duration": round(found.duration, 2),
        "segments": segments,
    }
    return json.dumps(whole, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Transcript], str]] = {
    "txt": _txt,
    "srt": _srt,
    "vtt": _vtt,
    "json": _json,
}


def usage(found: Transcript) -> dict[str, Any]:
    """Usage in OpenAI's form: recordings are counted by started seconds."""
    return {"type": "duration", "seconds": math.ceil(found.duration)}


def verbose(found: Transcript, task: str) -> dict[str, Any]:
    """OpenAI's `verbose_json`."""
    segments = [_segment(i, segment) for i, segment in enumerate(found.segments)]
    about = {
        "task": task,
        "language": found.language,
        "duration": round(found.duration, 2),
        "text": found.text,
    }
    return {**about, "segments": segments, "usage": usage(found)}


def _segment(index: int, segment: Segment) -> dict[str, Any]:
    times = {"start": round(segment.start, 2), "end": round(segment.end, 2)}
    drawn = {
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
    }
    fields = {
        "text": segment.text,
        "tokens": segment.token_ids,
        "no_speech_prob": segment.no_speech_prob,
    }
    return {"id": index, "seek": segment.seek, **times, **fields, **drawn}


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
