"""Pictures and recordings as vLLM's scripts pass them on."""

from __future__ import annotations

import base64
import importlib
import io
from typing import Any

from toolkit_lm.errors import UnsupportedError


def convert_image_mode(image: Any, to_mode: str) -> Any:
    """A Pillow picture in another mode. Transparent parts become white."""
    if image.mode == "RGBA" and to_mode == "RGB":
        white = importlib.import_module("PIL.Image").new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image)
        return white.convert("RGB")
    return image if image.mode == to_mode else image.convert(to_mode)


def encode_image_base64(image: Any, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """A Pillow picture as a file, in base64."""
    file = io.BytesIO()
    convert_image_mode(image, image_mode).save(file, format)
    return base64.b64encode(file.getvalue()).decode()


def encode_image_url(image: Any, *, image_mode: str = "RGB", format: str = "PNG") -> str:
    """A Pillow picture as a data URL."""
    text = encode_image_base64(image, image_mode=image_mode, format=format)
    return f"data:image/{format.lower()};base64,{text}"


def encode_audio_base64(audio: Any, sampling_rate: int, *, format: str = "WAV") -> str:
    """Samples in [-1, 1], [N], as a file, in base64."""
    file = io.BytesIO()
    importlib.import_module("soundfile").write(file, audio, sampling_rate, format=format)
    return base64.b64encode(file.getvalue()).decode()


def fetch_image(image_url: str, **options: Any) -> Any:
    """The picture of a data URL, as Pillow's. Raises UnsupportedError for another URL."""
    head, comma, data = image_url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise UnsupportedError(
            "no picture is fetched here: give its URL in a message of chat(), or a data URL."
        )
    return importlib.import_module("PIL.Image").open(io.BytesIO(base64.b64decode(data)))
