"""Assets of vLLM's examples: files in its cache. None is downloaded."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit_lm.errors import UnsupportedError

_VARIABLE = "VLLM_ASSETS_CACHE"


def get_cache_dir() -> Path:
    """The folder VLLM_ASSETS_CACHE, else ~/.cache/vllm/assets."""
    return Path(os.environ.get(_VARIABLE) or Path.home() / ".cache" / "vllm" / "assets")


def get_vllm_public_assets(filename: str, s3_prefix: str | None = None) -> Path:
    """The file of an asset. Raises UnsupportedError if it is not there."""
    path = get_cache_dir() / "vllm_public_assets" / filename
    if not path.is_file():
        raise UnsupportedError(
            f"there is no asset {str(path)!r}, and none is downloaded: put it there (the variable "
            f"{_VARIABLE} names the folder), or open a picture of your own with PIL.Image.open."
        )
    return path


@dataclass(frozen=True)
class ImageAsset:
    """A picture."""

    name: str

    def get_path(self, ext: str = "jpg") -> Path:
        """Its file. Raises UnsupportedError."""
        return get_vllm_public_assets(f"{self.name}.{ext}")

    @property
    def pil_image(self) -> Any:
        """The picture, as Pillow's."""
        return self.pil_image_ext("jpg")

    def pil_image_ext(self, ext: str) -> Any:
        """The picture of a file with this ending."""
        return importlib.import_module("PIL.Image").open(self.get_path(ext))


@dataclass(frozen=True)
class AudioAsset:
    """A recording."""

    name: str

    def get_local_path(self) -> Path:
        """Its file. Raises UnsupportedError."""
        return get_vllm_public_assets(f"{self.name}.ogg")

    @property
    def audio_and_sample_rate(self) -> tuple[Any, float]:
        """Samples and their rate, by soundfile."""
        samples, rate = importlib.import_module("soundfile").read(self.get_local_path())
        return samples, rate


@dataclass(frozen=True)
class VideoAsset:
    """A video."""

    name: str
    num_frames: int = -1
    fps: float = -1

    @property
    def video_path(self) -> str:
        """Its file. Raises UnsupportedError."""
        return str(get_vllm_public_assets(f"{self.name}.mp4"))
