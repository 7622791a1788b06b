"""Multi-token prediction (MTP): heads in a model's own checkpoint, and their names there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    HFConfig,
    Model,
    Rotation,
    join,
    torch_dtype,
)
from toolkit_lm_decoder.llama import LlamaParts, norm_of
from torch import Tensor, nn


class Layout(NamedTuple):
    """Names of the tensors of MTP heads, and what differs between the families' formulas."""

    example: str
    """Name of one tensor of the first head. {layer} is the number of the model's layers."""
    families: str
    pattern: str
    """Regular expression of a tensor's name, whose groups are a number (none: all heads share the
    tensor) and the rest of the name."""
    counts_on: bool
    """Heads are numbered from the model's number of layers on."""
    modules: tuple[tuple[str, str], ...]
    """Names of modules, and their names in MtpHead; others belong to the layer."""
    hidden_first: bool = False
    """The projection reads the hidden state, then the embedding."""
    masks_first: bool = True
    """The embedding of entry 0 is zero."""
    norms_hidden: bool = False
    """The next head reads the hidden state after the norm."""


LAYOUTS = (
    Layout(
        example="model.layers.{layer}.eh_proj.weight",
        families="DeepSeek-V3 and GLM-4.5 to 4.7",
        pattern=r"^model\.layers\.(\d+)\.(.*)",
        counts_on=True,
        modules=(
            ("enorm", "embed_norm"),
            ("hnorm", "hidden_norm"),
            ("eh_proj", "proj"),
            ("shared_head.norm", "norm"),
        ),
    ),
    Layout(
        example="mtp.fc.weight",
        families="Qwen3-Next and Qwen3.5",
        pattern=r"^(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.*)",
        counts_on=False,
        modules=(
            ("pre_fc_norm_embedding", "embed_norm"),
            ("pre_fc_norm_hidden", "hidden_norm"),
            ("fc", "proj"),
            ("norm", "norm"),
        ),
        masks_first=False,
        norms_hidden=True,
    ),
    Layout(
        example="model.mtp_layers.0.input_proj.weight",
        families="MiMo",
        pattern=r"^model\.mtp_layers\.(\d+)\.(.*)",
        counts_on=False,
        modules=(
            ("token_layernorm", "embed_norm"),
            ("hidden_layernorm", "hidden_norm"),
            ("input_proj", "proj"),
            ("final_layernorm", "norm"),
        ),
        hidden_first=True,
        norms_hidden=True,
    ),
)
_SHARED = ("shared_head.head.", "embed_tokens.")
"""Copies of the model's embedding and head, which the model's own stand for."""


class MtpHead(nn.Module):
    """norm(layer(proj(norm(embedding of the next token), norm(hidden state)))), with a layer of the
    model's kind."""

    rotary: nn.Module

    def __init__(
        self, layout: Layout, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        self.layout = layout
        self.embed_norm = norm_of(config, vllm_config, parts.norm)
        self.hidden_norm = norm_of(config, vllm_config, parts.norm)
        # Checkpoints with quantized layers have this one in the model's dtype.
        self.proj = nn.Linear(
            2 * size, size, bias=False, dtype=torch_dtype(vllm_config.model.dtype)
        )
        self.layer = parts.layer(parts, vllm_config=vllm_config, prefix=prefix)
        self.norm = norm_of(config, vllm_config, parts.norm)

    def forward(
        self, input_ids: Tensor, positions: Tensor, *, embeds: Tensor, hidden: Tensor
    ) -> Tensor:
        if self.layout.masks_first:
            embeds = embeds.masked_fill((positions == 0).unsqueeze(-1), 0)
        both = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        if self.layout.hidden_first:
            both.reverse()
        rotation: Rotation = self.rotary(positions)
        x, residual = self.layer(self.proj(torch.cat(both, dim=-1)), None, rotation)
        if self.layout.norms_hidden:
            normed: Tensor = self.norm(x, residual)[0]
            return normed
        out: Tensor = x + residual
        return out

    def before_logits(self, hidden: Tensor) -> Tensor:
        """Input of the model's head, from results of `forward`."""
        normed: Tensor = hidden if self.layout.norms_hidden else self.norm(hidden)
        return normed


class MtpModel(Model):
    """All heads of a checkpoint. A subclass names what they are of."""

    layout: ClassVar[Layout]
    parts_of_layer: ClassVar[type[LlamaParts]]
    num_heads: ClassVar[int]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.first = config.require("num_hidden_layers", int)
        self.heads = nn.ModuleList(
            MtpHead(
                self.layout,
                self.parts_of_layer,
                vllm_config=vllm_config,
                prefix=join(prefix, f"layers.{self.first + index}"),
            )
            for index in range(self.num_heads)
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._own(weights))

    def _own(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The heads' tensors, by their names here."""
        start = self.first if self.layout.counts_on else 0
        for name, tensor in weights:
            if (found := head_and_name(self.layout, name, start)) is None:
                continue
            head, own = found
            if own.startswith(_SHARED):
                continue
            for index in range(self.num_heads) if head is None else [head]:
                yield f"heads.{index}.{own}", tensor


def head_and_name(layout: Layout, name: str, start: int) -> tuple[int | None, str] | None:
    """A tensor's head (None: all) and its name in MtpHead; None: it belongs to the model. `start`:
    number of the first head."""
    found = re.match(layout.pattern, name)
    if found is None or (found[1] is None and layout.counts_on):
        return None
    head = None if found[1] is None else int(found[1]) - start
    if head is not None and head < 0:
        return None
    for theirs, ours in layout.modules:
        if found[2].startswith(f"{theirs}."):
            return head, ours + found[2].removeprefix(theirs)
    return head, (found[2] if found[2].startswith(_SHARED) else f"layer.{found[2]}")


def find_layout(names: Iterable[str], num_layers: int) -> tuple[Layout, int] | None:
    """The layout of a checkpoint's MTP heads, and their number; None: it has none."""
    names = list(names)
    for layout in LAYOUTS:
        start = num_layers if layout.counts_on else 0
        example = layout.example.format(layer=num_layers)
        if example not in names:
            continue
        heads = {found[0] for name in names if (found := head_and_name(layout, name, start))}
        return layout, 1 + max((head for head in heads if head is not None), default=0)
    return None
