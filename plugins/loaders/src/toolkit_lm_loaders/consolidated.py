"""Weights of consolidated.safetensors, Mistral's own file, under the names of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit_lm.errors import CheckpointError
from toolkit_lm_weights.safetensors import CheckpointWeights
from torch import Tensor

FILES = "consolidated*.safetensors"
_SHARD = re.compile(r"consolidated-\d{5}-of-(\d{5})\.safetensors")
_LAYER = r"layers\.(\d+)\."
_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"tok_embeddings\.", "model.embed_tokens."),
        (r"norm\.", "model.norm."),
        (r"output\.", "lm_head."),
        (rf"{_LAYER}attention\.w([qkvo])\.", r"model.layers.\1.self_attn.\2_proj."),
        (rf"{_LAYER}attention_norm\.", r"model.layers.\1.input_layernorm."),
        (rf"{_LAYER}ffn_norm\.", r"model.layers.\1.post_attention_layernorm."),
        (rf"{_LAYER}feed_forward\.w1\.", r"model.layers.\1.mlp.gate_proj."),
        (rf"{_LAYER}feed_forward\.w2\.", r"model.layers.\1.mlp.down_proj."),
        (rf"{_LAYER}feed_forward\.w3\.", r"model.layers.\1.mlp.up_proj."),
        (
            rf"{_LAYER}(?:feed_forward|block_sparse_moe)\.(gate|experts)\.",
            r"model.layers.\1.block_sparse_moe.\2.",
        ),
    )
)
_VISION_LAYER = r"vision_encoder\.transformer\.layers\.(\d+)\."
_TOWER_LAYER = r"vision_tower.transformer.layers.\1."
_VISION_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"{_VISION_LAYER}attention\.w([qkvo])\.", rf"{_TOWER_LAYER}attention.\2_proj."),
        (rf"{_VISION_LAYER}feed_forward\.w1\.", rf"{_TOWER_LAYER}feed_forward.gate_proj."),
        (rf"{_VISION_LAYER}feed_forward\.w2\.", rf"{_TOWER_LAYER}feed_forward.down_proj."),
        (rf"{_VISION_LAYER}feed_forward\.w3\.", rf"{_TOWER_LAYER}feed_forward.up_proj."),
        (rf"{_VISION_LAYER}(attention_norm|ffn_norm)\.", rf"{_TOWER_LAYER}\2."),
        (r"vision_encoder\.(patch_conv|ln_pre)\.", r"vision_tower.\1."),
        (r"vision_language_adapter\.w_in\.", "multi_modal_projector.linear_1."),
        (r"vision_language_adapter\.w_out\.", "multi_modal_projector.linear_2."),
        (r"pre_mm_projector_norm\.", "multi_modal_projector.norm."),
        (r"patch_merger\.", "multi_modal_projector.patch_merger."),
    )
)
_TURNED = re.compile(r"\.([qk])_proj\.weight$")
"""Weights whose rows are pairs of a rotation side by side. In transformers' they are half a head
apart."""


class ConsolidatedWeights(CheckpointWeights):
    """Iterates over (name, tensor), named and laid out as transformers' files."""

    def __init__(self, source: Path, config: Mapping[str, Any]) -> None:
        """`config`: the checkpoint's config.json. Raises CheckpointError that names a missing or
        broken file."""
        super().__init__(source)
        self._config = config

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().__iter__():
            named = self._named(name)
            if (match := _TURNED.search(named)) is not None:
                tensor = _halves(named, tensor, self._heads(named, match[1]))
            yield named, tensor

    def names(self) -> list[str]:
        return [self._named(name) for name in super().names()]

    def _named(self, name: str) -> str:
        sees = "vision_config" in self._config
        for pattern, replacement in _NAMES:
            if pattern.match(name):
                named = pattern.sub(replacement, name, count=1)
                return f"language_model.{named}" if sees else named
        for pattern, replacement in _VISION_NAMES if sees else ():
            if pattern.match(name):
                return pattern.sub(replacement, name, count=1)
        raise CheckpointError(f"{self.source}: no tensor of Mistral's layout is named {name!r}.")

    def _heads(self, named: str, letter: str) -> int:
        """Heads of a projection of queries or keys. The tower has as many of each."""
        sees = named.startswith("vision_tower.")
        part = self._config["vision_config"] if sees else self._config.get("text_config")
        key = "num_attention_heads" if sees or letter == "q" else "num_key_value_heads"
        heads: int = (part or self._config)[key]
        return heads

    def __str__(self) -> str:
        return str(self.source)

    def _find(self) -> list[str]:
        found = sorted(path.name for path in self.source.glob(FILES))
        counts = {int(match[1]) for name in found if (match := _SHARD.fullmatch(name))}
        if "consolidated.safetensors" in found and not counts:
            files = ["consolidated.safetensors"]
        elif len(counts) == 1:
            [count] = counts
            files = [f"consolidated-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        else:
            raise CheckpointError(
                f"{self.source} must hold consolidated.safetensors, or all of "
                f"consolidated-00001-of-0000N.safetensors. It holds: {', '.join(found) or 'none'}."
            )
        if missing := [file for file in files if file not in found]:
            raise CheckpointError(f"{self.source} lacks {', '.join(missing)}.")
        for file in files:
            self._check(self.source / file)
        return files


def _halves(name: str, weight: Tensor, heads: int) -> Tensor:
    """Rows [heads, pairs, 2] of a projection, as [heads, 2, pairs]."""
    if weight.ndim != 2 or weight.shape[0] % (2 * heads):
        raise CheckpointError(f"{name} has the shape {tuple(weight.shape)}, of {heads} heads.")
    rows = weight.view(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return rows.transpose(1, 2).reshape(weight.shape)
