"""Files that go along with a message."""

from __future__ import annotations

import mimetypes
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

_MOST = 25 * 2**20
"""Bytes of a file: what a model takes by default (max_media_bytes)."""


def image_parts(files: Sequence[Path]) -> list[dict[str, Any]]:
    """A content part for each image, with the file inside. What it shows is looked at by the
    model's renderer. Raises BadParameter."""
    return [{"type": "image_url", "image_url": {"url": _data_url(file)}} for file in files]


def audio_parts(files: Sequence[Path]) -> list[dict[str, Any]]:
    """A content part for each recording, with the file inside, whose name says its format. Raises
    BadParameter."""
    return [
        {
            "type": "input_audio",
            "input_audio": {
                "data": _encoded(file, "--audio"),
                "format": file.suffix[1:].lower() or "wav",
            },
        }
        for file in files
    ]


def question(text: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A user's message: images and recordings, then the text."""
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}


def _data_url(file: Path) -> str:
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{_encoded(file, '--image')}"


def _encoded(file: Path, flag: str) -> str:
    """Its content in base64."""
    hint = f"'{flag}'"
    try:
        with file.open("rb") as opened:
            data = opened.read(_MOST + 1)
    except OSError as error:
        raise typer.BadParameter(
            f"{str(file)!r} cannot be read: {error.strerror}.", param_hint=hint
        ) from None
    if len(data) > _MOST:
        raise typer.BadParameter(f"{str(file)!r} has more than {_MOST} bytes.", param_hint=hint)
    if not data:
        raise typer.BadParameter(f"{str(file)!r} is empty.", param_hint=hint)
    return b64encode(data).decode()
