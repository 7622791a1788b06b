"""GlanceRenderer: bytes are tokens, and a zero byte is an image, which it cuts into tiles."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, MultiModalFeatureSpec, PlaceholderRange
from toolkit_lm.prompts import Conversation, parse_prompt
from toolkit_lm.renderer import DecodeStream, Rendered, Renderer


class Latin1(DecodeStream):
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) if token < 256 else "" for token in token_ids)

    def flush(self) -> str:
        return ""


class GlanceRenderer(Renderer):
    vocab_size = 300
    eos_token_ids: list[int] = []

    def render_conversation(self, messages: Conversation, **kwargs: Any) -> Rendered:
        raise RequestError("Glance has no chat template.", "messages")

    def render_prompt(
        self, prompt: Any, *, add_special_tokens: bool = True, **options: Any
    ) -> Rendered:
        parsed: Any = parse_prompt(prompt, media=True)
        images = list(parsed.get("multi_modal_data", {}).get("image", ()))
        token_ids: list[int] = []
        features: list[MultiModalFeatureSpec] = []
        for token in parsed.get("prompt_token_ids") or list(parsed["prompt"].encode("latin-1")):
            if token or not images:
                token_ids.append(token)
                continue
            features.append(self._feature(images.pop(0), len(token_ids)))
            assert self.rules is not None and features[-1].data is not None
            token_ids += self.rules.replacement(
                "image", {"tiles": features[-1].data["tiles"].to_numpy()}
            ).token_ids
        if images:
            raise RequestError("there are more images than places for them.", "multi_modal_data")
        return Rendered(token_ids, features)

    def _feature(self, image: np.ndarray, offset: int) -> MultiModalFeatureSpec:
        size = self.config.hf_config["tile_size"]
        rows = image.shape[0] // size
        columns = image.shape[1] // size
        cut = (
            image[: rows * size, : columns * size].reshape(rows, size, columns, size).swapaxes(1, 2)
        )
        tiles = np.ascontiguousarray(cut.reshape(rows, columns, size**2), np.float32)
        assert self.rules is not None
        token_ids, mask, layout = self.rules.replacement("image", {"tiles": tiles})
        return MultiModalFeatureSpec(
            modality="image",
            mm_identifier=hashlib.sha256(repr(tiles.shape).encode() + tiles.tobytes()).hexdigest(),
            mm_position=PlaceholderRange(offset, len(token_ids), mask),
            data={"tiles": Array.of(tiles)},
            layout=layout,
        )

    def decode_stream(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        return Latin1()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return Latin1().push(token_ids)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        return [Latin1().push([token]) for token in token_ids]
