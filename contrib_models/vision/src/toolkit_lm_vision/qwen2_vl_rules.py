"""Prompt rules of Qwen2-VL and Qwen2.5-VL: placeholders of pictures and videos. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import MultiModalRules, Replacement

from toolkit_lm_vision.frames import TIME_IDS, TIMES, frame_texts
from toolkit_lm_vision.qwen2_vl_shape import Grid, PatchShape

if TYPE_CHECKING:
    import numpy as np

SECONDS = "second_per_grid_ts"
_MOST_PATCHES = 2**24
_MOST_SECONDS = 2**24


class Names:
    """Names of a modality's arrays in transformers."""

    def __init__(self, modality: str) -> None:
        self.pixels = "pixel_values" if modality == "image" else "pixel_values_videos"
        """[patches, numbers of a patch] floats."""
        self.grid = f"{modality}_grid_thw"
        """[3], or [1, 3], integers."""


class Qwen2VLRules(MultiModalRules):
    """An item is as many image tokens, or video tokens, as its grid of patches has squares that are
    merged."""

    modalities: tuple[str, ...] = ("image", "video")
    tower: ClassVar[str] = "qwen2_vl"
    """Kind of the tower, as in PatchShape."""

    tokens: ClassVar[Mapping[str, int]] = {"image": 151655, "video": 151656}
    """Placeholders that config.json does not state."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.shape = PatchShape.read(config.hf_config, self.tower)

    def placeholder_id(self, modality: str) -> int:
        token = HFConfig(self.config.hf_config).get(
            f"{modality}_token_id", int, self.tokens[modality]
        )
        if not 0 <= token < (self.config.vocab_size or token + 1):
            raise CheckpointError(
                f"config.json: the {modality} token {token} is not in the vocabulary."
            )
        return token

    def placeholder_text(self, modality: str, token: str) -> str:
        return f"<|vision_start|>{token}<|vision_end|>"

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        names = Names(modality)
        values = "embeds" if "embeds" in data else names.pixels
        timed = modality == "video" and self.shape.tokens_per_second is not None
        if set(data) - ({SECONDS} if timed else set()) != {values, names.grid}:
            raise RequestError(
                f"one {modality} must have {names.grid} and {names.pixels} or embeds, not "
                f"{sorted(data)}."
            )
        grid = self._grid(names.grid, data[names.grid])
        num_tokens = self.shape.num_tokens(grid)
        rows = (
            (num_tokens, self.shape.embed_size)
            if values == "embeds"
            else (grid.num_patches, self.shape.patch_values)
        )
        array = data[values]
        if array.shape != rows or array.dtype.kind != "f":
            raise RequestError(
                f"{values} must be floats of shape {list(rows)}, not {array.dtype} of shape "
                f"{list(array.shape)}."
            )
        if not abs(array.astype("float32", copy=False)).max() < float("inf"):
            raise RequestError(f"{values} must be finite.")
        layout: dict[str, list[float]] = {"grid_thw": list(grid)}
        if timed:
            layout[SECONDS] = [self._seconds(data.get(SECONDS), grid, num_tokens)]
        return Replacement([self.placeholder_id(modality)] * num_tokens, layout=layout)

    def _grid(self, name: str, array: np.ndarray) -> Grid:
        if array.size != 3 or array.dtype.kind not in "iu":
            raise RequestError(
                f"{name} must be 3 integers, not {array.dtype} of shape {list(array.shape)}."
            )
        grid = Grid(*array.ravel().tolist())
        if (
            min(grid) < 1
            or grid.num_patches > _MOST_PATCHES
            or grid.h % self.shape.merge
            or grid.w % self.shape.merge
        ):
            raise RequestError(
                f"{name} must be positive, and height and width multiples of {self.shape.merge}, "
                f"not {list(grid)}."
            )
        return grid

    def _seconds(self, array: np.ndarray | None, grid: Grid, num_tokens: int) -> float:
        """Between frames; 1 where it is not stated. A video has no more positions than tokens: so
        none lies past its token's index."""
        if array is not None and (array.size != 1 or array.dtype.kind not in "iuf"):
            raise RequestError(
                f"{SECONDS} must be one number, not {array.dtype} of shape {list(array.shape)}."
            )
        seconds = 1.0 if array is None else float(array.ravel()[0])
        if not 0 <= (grid.t - 1) * float(self.shape.interval(seconds)) < num_tokens:
            raise RequestError(
                f"{SECONDS} of {seconds} are too many for a video of {grid.t} frames and "
                f"{num_tokens} tokens."
            )
        return seconds


class Qwen25VLRules(Qwen2VLRules):
    """Rules of Qwen2-VL, but the frames of a video have positions by time."""

    tower = "qwen2_5_vl"


class Qwen3VLRules(Qwen2VLRules):
    """Rules of Qwen2-VL for pictures. Of a video, frames stand alone, each after its time in
    text."""

    tower = "qwen3_vl"
    marks: ClassVar[Mapping[str, int]] = {"vision_start": 151652, "vision_end": 151653}
    """Tokens around a frame that config.json does not state."""

    def time_text(self, seconds: float) -> str:
        """Time of a frame, as text."""
        return f"<{seconds:.1f} seconds>"

    def texts(self, modality: str, data: Mapping[str, np.ndarray]) -> Mapping[str, Sequence[str]]:
        if modality != "video":
            return {}
        times = data.get(TIMES)
        if times is None or times.ndim != 1 or times.dtype.kind not in "iuf":
            raise RequestError(f"one video must have {TIMES}: the seconds [n] of its frames.")
        if not all(0 <= time < _MOST_SECONDS for time in times.tolist()):
            raise RequestError(f"{TIMES} must be from 0 to {_MOST_SECONDS} seconds.")
        return {TIME_IDS: [self.time_text(time) for time in times.tolist()]}

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if modality != "video":
            return super().replacement(modality, data)
        of_frames = {name: array for name, array in data.items() if name not in (TIMES, TIME_IDS)}
        whole = super().replacement(modality, of_frames)
        num_frames = int(whole.layout["grid_thw"][0])
        count = len(whole.token_ids) // num_frames
        token_ids: list[int] = []
        mask: list[bool] = []
        special = {self.placeholder_id(modality) for modality in self.modalities}
        vocab_size = self.config.vocab_size
        for time in frame_texts(data, num_frames, num_frames, special, vocab_size):
            before, token, after = self.around(time)
            token_ids += [*before, *[token] * count, *after]
            mask += [*[False] * len(before), *[True] * count, *[False] * len(after)]
        return Replacement(token_ids, mask, whole.layout)

    def around(self, time: list[int]) -> tuple[list[int], int, list[int]]:
        """Tokens before those of a frame at `time`, the token that stands for each of these, and
        tokens after them."""
        before = [*time, self.mark("vision_start")]
        return before, self.placeholder_id("video"), [self.mark("vision_end")]

    def mark(self, name: str) -> int:
        """Token beside a frame."""
        return HFConfig(self.config.hf_config).get(f"{name}_token_id", int, self.marks[name])


class Qwen35Rules(Qwen3VLRules):
    """Rules of Qwen3-VL; its tokens have other ids."""

    tower = "qwen3_5"
    tokens = {"image": 248056, "video": 248057}
    marks = {"vision_start": 248053, "vision_end": 248054}
