"""Prompt rules of Glance: placeholders of images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import MultiModalRules, Replacement


class GlanceRules(MultiModalRules):
    """An image is a token for each tile, and one that ends each row: that is a token like any
    other."""

    def placeholder_id(self, modality: str) -> int:
        token: int = self.config.hf_config["tile_token_id"]
        return token

    def replacement(self, modality: str, data: Mapping[str, np.ndarray]) -> Replacement:
        if (
            set(data) != {"tiles"}
            or data["tiles"].dtype != np.float32
            or not np.isfinite(data["tiles"]).all()
        ):
            raise RequestError("an image of this model is an array `tiles` of finite float32.")
        shape = data["tiles"].shape
        if len(shape) != 3 or not all(shape) or shape[2] != self.config.hf_config["tile_size"] ** 2:
            raise RequestError(
                "tiles must have the shape [rows, columns, "
                f"{self.config.hf_config['tile_size'] ** 2}], not {list(shape)}."
            )
        row = [self.placeholder_id(modality)] * shape[1] + [self.config.hf_config["row_token_id"]]
        return Replacement(row * shape[0], ([True] * shape[1] + [False]) * shape[0])
