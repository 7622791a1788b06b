"""Prompt rules of SmolVLM: pictures as Idefics3 has them, and videos, whose frames are tiles after
their times. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import Replacement

from toolkit_lm_vision.frames import TIME_IDS, TIMES, frame_seconds, frame_texts
from toolkit_lm_vision.idefics3_rules import AROUND, WHOLE, Idefics3Rules
from toolkit_lm_vision.internvl_rules import added_token, highest_added_token

if TYPE_CHECKING:
    import numpy as np

DURATION = "duration"
"""Name of the array [1] of a video's seconds."""
VIDEO = "<video>"
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class SmolVLMRules(Idefics3Rules):
    """A video is a sentence of how many frames and how long it is, and each frame in one tile after
    its time. `<video>` stands for one; the tokenizer need have no token of it. There are no videos
    without a tokenizer."""

    modalities: tuple[str, ...] = ("image", "video")
    # The rest of the sentence is the item's, and begins a word.
    surround: ClassVar[Mapping[str, tuple[str, str]]] = {
        "video": ("You are provided the following series of", "\n\n")
    }

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        highest = highest_added_token(config)
        if highest is None:
            self.modalities = ("image",)
            return
        known = added_token(config, VIDEO)
        # An id that the model never draws.
        self._video = max(config.vocab_size or 0, highest + 1) if known is None else known

    def placeholder_id(self, modality: str) -> int:
        return self._video if modality == "video" else super().placeholder_id(modality)

    def placeholder_text(self, modality: str, token: str) -> str:
        return VIDEO if modality == "video" else token

    def texts(self, modality: str, data: Mapping[str, np.ndarray]) -> Mapping[str, Sequence[str]]:
        if modality != "video":
            return {}
        seconds = frame_seconds(data)
        whole = timedelta(seconds=int(self._duration(data, seconds)))
        first, *times = [f"Frame from {int(at) // 60:02d}:{int(at) % 60:02d}:" for at in seconds]
        intro = f" {in_words(len(seconds))} frames from a {whole} [H:MM:SS] video.\n\n{first}"
        return {TIME_IDS: [intro, *(f"\n{time}" for time in times)]}

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if modality != "video":
            return super().replacement(modality, data)
        name = "embeds" if "embeds" in data else "pixel_values"
        if name not in data or set(data) - {name, TIMES, TIME_IDS, DURATION}:
            raise RequestError(
                f"one video must have pixel_values or embeds, and {TIMES}, and may have "
                f"{DURATION}, not {sorted(data)}."
            )
        seconds = frame_seconds(data)
        count = len(seconds)
        self._duration(data, seconds)
        if (tiles := self._tiles(name, data[name])) != count:
            raise RequestError(f"{TIMES} of a video of {tiles} frames are {count}.")
        token = self.placeholder_id("image")
        special = {token, self._video}
        ids: list[int] = []
        for text in frame_texts(data, count, count, special, self.config.vocab_size):
            tile = [token] * self.num_tokens
            ids += [*text, *self.marks.of(AROUND, WHOLE), *tile, *self.marks.of(AROUND)]
        return Replacement(ids, [number == token for number in ids])

    def _duration(self, data: Mapping[str, np.ndarray], seconds: Sequence[float]) -> float:
        """Seconds of the video, as stated, else the last frame's time. Raises RequestError."""
        stated = data.get(DURATION)
        if stated is None:
            return seconds[-1]
        if stated.shape != (1,) or stated.dtype.kind not in "iuf" or not 0 <= stated[0] < 2**24:
            raise RequestError(f"{DURATION} of a video must be one number of seconds.")
        return float(stated[0])


def in_words(number: int) -> str:
    """A number below 1,000,000 in English words, as num2words writes it: "one hundred and two"."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        rest = f"-{_ONES[number % 10]}" if number % 10 else ""
        return f"{_TENS[number // 10 - 2]}{rest}"
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    many, rest_of = divmod(number, unit)
    words = f"{in_words(many)} {name}"
    if not rest_of:
        return words
    return f"{words}{' and' if rest_of < 100 else ','} {in_words(rest_of)}"
