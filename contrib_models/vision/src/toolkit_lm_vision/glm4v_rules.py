"""Prompt rules of GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: placeholders of pictures and videos.
Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from toolkit_lm.config import VllmConfig

from toolkit_lm_vision.internvl_rules import lacks_token
from toolkit_lm_vision.qwen2_vl_rules import Qwen3VLRules

_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "tokenizer_config.json",
)
_TENTHS = {"Glm4vProcessor": False, "Glm46VProcessor": True}
"""Processors in transformers, and whether the times that they write have tenths of seconds."""


class Glm4vRules(Qwen3VLRules):
    """Rules of Qwen3-VL, but frames of a video are pictures, each before its time. GLM-4.5V and
    GLM-4.6V with experts differ by their processor alone. There are no videos where the tokenizer
    has no token of them."""

    tower = "glm4v"
    tokens = {"image": 151343, "video": 151344}
    marks = {"image_start": 151339, "image_end": 151340}
    has_tenths: ClassVar[bool] = False
    """Whether times have tenths of seconds, where the checkpoint names no processor."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        if lacks_token(config, self.placeholder_id("video")):
            self.modalities = ("image",)
        stated = _TENTHS.get(_processor_of(config))
        self._has_tenths = self.has_tenths if stated is None else stated

    def placeholder_text(self, modality: str, token: str) -> str:
        return f"<|begin_of_{modality}|>{token}<|end_of_{modality}|>"

    def time_text(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds" if self._has_tenths else str(int(seconds))

    def around(self, time: list[int]) -> tuple[list[int], int, list[int]]:
        before = [self.mark("image_start")]
        return before, self.placeholder_id("image"), [self.mark("image_end"), *time]


class Glm46vRules(Glm4vRules):
    has_tenths = True


class GlmOcrRules(Glm46vRules):
    tower = "glm_ocr"
    tokens = {"image": 59280, "video": 59281}
    marks = {"image_start": 59256, "image_end": 59257}


def _processor_of(config: VllmConfig) -> str:
    """Name of the processor in transformers; empty where no file of the checkpoint states it."""
    if config.checkpoint is None:
        return ""
    folder = Path(config.renderer.tokenizer or config.checkpoint.path)
    for name in _FILES:
        try:
            found = json.loads((folder / name).read_text("utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, Mapping) and isinstance(stated := found.get("processor_class"), str):
            return stated
    return ""
