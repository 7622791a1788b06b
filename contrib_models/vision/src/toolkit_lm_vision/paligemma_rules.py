"""Prompt rules of PaliGemma and PaliGemma 2: placeholders of pictures, and prompts that are read in
both directions. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig
from toolkit_lm.renderer import Replacement

from toolkit_lm_vision.marks import Marks
from toolkit_lm_vision.pictures import PictureRules

_BEGIN = 2
"""Begin of a text, where config.json states none."""


class PaliGemmaRules(PictureRules):
    """A picture is as many image tokens as patches. A text follows all of them, which begins as
    texts do, and ends with a line break; all of a prompt with pictures sees all of it."""

    bidirectional = True
    whole_prompts = True
    default_hidden_size = 2048

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        text = HFConfig(self.hf_config.require("text_config", dict))
        found: Any = text.get("bos_token_id", int)
        self.begin = _BEGIN if found is None else found
        self.marks = Marks(config, r"<.*>|\[.*\]", ("\n",))

    def placeholder_id(self, modality: str) -> int:
        return self.token_id("image", 256_000)

    def tokens_of_picture(self) -> Replacement:
        return Replacement([self.placeholder_id("image")] * self.shape.num_states)

    def complete(self, token_ids: Sequence[int]) -> Sequence[int]:
        tokens = list(token_ids)
        image = self.placeholder_id("image")
        if image not in tokens:
            return tokens
        if tokens[0] == self.begin:
            del tokens[0]
        place = len(tokens) - tokens[::-1].index(image)
        if tokens[place : place + 1] != [self.begin]:
            tokens.insert(place, self.begin)
        line_break = self.marks.of("\n")
        return tokens if tokens[-len(line_break) :] == line_break else [*tokens, *line_break]
