"""Transcripts as text: txt, srt, vtt, json."""

from __future__ import annotations

import json
from collections.abc import Callable

from toolkit_lm_whisper.transcriber import Transcript


def _txt(found: Transcript) -> str:
    return found.text + "\n"


def _srt(found: Transcript) -> str:
    parts = enumerate(found.segments, 1)
    return "".join(f"{i}\n{_clock(s.start, ',')} --> {_clock(s.end, ',')}\n{s.text.strip()}\n\n" for i, s in parts)


def _vtt(found: Transcript) -> str:
    return "WEBVTT\n\n" + "".join(f"{_clock(s.start, '.')} --> {_clock(s.end, '.')}\n{s.text.strip()}\n\n" for s in found.segments)


def _json(found: Transcript) -> str:
    segments = [{"start": round(s.start, 2), "end": round(s.end, 2), "text": s.text, "tokens": s.token_ids} for s in found.segments]
    whole = {"text": found.text, "language": found.language, "duration": round(found.duration, 2), "segments": segments}
    return json.dumps(whole, ensure_ascii=False) + "\n"


FORMATS: dict[str, Callable[[Transcript], str]] = {"txt": _txt, "srt": _srt, "vtt": _vtt, "json": _json}


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
