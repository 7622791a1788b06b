"""A decoder of transformers whose cross attention reads the states of an encoder, which lie in
pages of the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from toolkit_lm.attention import current
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import torch_dtype
from torch import Tensor

from toolkit_lm_transformers.head import EncoderStates
from toolkit_lm_transformers.layout import CacheLayout, Entry
from toolkit_lm_transformers.sequences import (
    Decoder,
    PageLayer,
    bytes_of,
    names_of,
    read_tokens,
    write_tokens,
)
from toolkit_lm_transformers.spec import EncodedSpec

_READ_IDS = ("fsmt",)
"""Types whose code masks the decoder only where it is given `input_ids` of the encoder, too."""


class EncodedDecoder(Decoder):
    """The decoder's forward pass over whole sequences: ids [T], and states [E, H] of the encoder
    sequences that this step computes -> logits [T, V].

    Sequences of equal lengths on both sides are computed together, others apart: no token is
    padding.
    """

    decode: Callable[..., Any]
    """The forward of the whole model."""

    def __init__(
        self,
        layout: CacheLayout,
        hf_config: Any,
        width: int,
        *,
        vllm_config: VllmConfig,
        prefix: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`width`: numbers of a token in the encoder's states. `dtype`: theirs; None: the
        model's."""
        super().__init__(layout, hf_config, vllm_config=vllm_config, prefix=prefix)
        dtype = dtype or torch_dtype(vllm_config.model.dtype)
        states = [Entry(0, "last_hidden_state", None, 1, (width,), dtype)]
        spec = EncodedSpec(
            block_size=vllm_config.cache.block_size,
            widths=names_of(states),
            token_bytes=bytes_of(states),
        )
        self.encoded = PageLayer(states, spec, f"{self.prefix}.encoded")
        self.alone = takes_rows_alone(hf_config)
        self.reads_ids = hf_config.model_type in _READ_IDS

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        input_ids, *encoded = inputs
        for states in encoded:
            index = torch.arange(len(states))[None]
            (dtype,) = self.encoded.dtypes
            write_tokens(self.encoded, index, {dtype: states[None]})
        super().compute(input_ids, out=out)

    def _recompute(
        self, input_ids: Tensor, out: Tensor, start: int, members: list[int], index: Tensor
    ) -> None:
        _, encoded = current(self.encoded.prefix)
        new = input_ids[index]
        past = [read_tokens(self, members, start)[torch.float32][..., 0].long()] if start else []
        tokens = torch.cat([*past, new], dim=1)
        lengths = [encoded.lengths[row] for row in members]
        for places in alike(lengths, alone=self.alone):
            rows = [members[place] for place in places]
            (states,) = read_tokens(self.encoded, rows, lengths[places[0]]).values()
            ids = {"input_ids": tokens[places]} if self.reads_ids else {}
            logits = logits_of_pair(self.decode, states, tokens[places], **ids)
            out[index[places]] = logits[:, start:].to(out.dtype)
        write_tokens(self, index, {torch.float32: new[..., None].float()})


def logits_of_pair(
    model: Callable[..., Any], states: Tensor, tokens: Tensor, **options: Tensor
) -> Tensor:
    """[B, T, V] of decoder tokens [B, T], from encoder states [B, E, H]."""
    encoded = EncoderStates(last_hidden_state=states)
    logits: Tensor = model(
        encoder_outputs=encoded, decoder_input_ids=tokens, use_cache=False, **options
    ).logits
    return logits


def takes_rows_alone(hf_config: Any) -> bool:
    """Whether a sequence must be computed by itself: experts drop tokens of a batch that are too
    many for them."""
    return hasattr(hf_config, "expert_capacity")


def alike(keys: Iterable[Hashable], *, alone: bool) -> list[list[int]]:
    """The places of equal keys, or each place by itself."""
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(place if alone else key, []).append(place)
    return list(found.values())
