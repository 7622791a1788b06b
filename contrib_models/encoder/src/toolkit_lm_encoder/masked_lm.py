"""Masked language models as embedders: vectors of hidden states, or the sparse ones of SPLADE
(Formal et al. 2021), which are made of logits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    Absent,
    HFConfig,
    LayerNorm,
    ReplicatedLinear,
    get_activation,
    join,
    torch_dtype,
)
from toolkit_lm_poolers import RowPooler, embedding_pooler, pools_splade, splade_pooler
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertEncoder, BertShape
from toolkit_lm_encoder.distilbert import DistilBertEncoder
from toolkit_lm_encoder.encoder import Renames
from toolkit_lm_encoder.heads import Embedder
from toolkit_lm_encoder.roberta import RobertaEncoder

_EMBEDDING = "embeddings.word_embeddings.weight"
_DECODER = "mlm_head.decoder."
_BIAS = "mlm_head.bias"


class MaskedLMHead(nn.Module):
    """Hidden states [N, H] -> logits [N, V]. It has a copy of the embedding where that is its
    weight."""

    def __init__(
        self, shape: BertShape, activation: str, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = shape.hidden_size
        self.dense = ReplicatedLinear(
            size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "dense")
        )
        self.activation = get_activation(activation)
        self.norm = LayerNorm(size, eps=shape.eps, dtype=torch_dtype(vllm_config.model.dtype))
        self.decoder = ReplicatedLinear(
            size,
            HFConfig(vllm_config.hf_config).require("vocab_size", int),
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "decoder"),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.norm(self.activation(self.dense(x))))
        return logits


class MaskedLM(Embedder, BertEncoder):
    """An encoder with a masked language model's head, which is passed over unless the checkpoint's
    files ask for SPLADE."""

    activation: ClassVar[str | None] = None
    """Activation of the head. None: that of the feed-forwards."""

    mlm_head: nn.Module

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not hasattr(self, "mlm_head"):
            self.mlm_head = Absent()

    def make_pooler(self, vllm_config: VllmConfig) -> RowPooler:
        if not pools_splade(vllm_config):
            return embedding_pooler(vllm_config, default="MEAN")
        if not self.is_first:
            raise UnsupportedError(
                "SPLADE's logits are made with the embedding, which this pipeline stage does not "
                "have: give pipeline_parallel_size=1."
            )
        shape = self.shape(HFConfig(vllm_config.hf_config))
        self.mlm_head = MaskedLMHead(
            shape,
            self.activation or shape.activation,
            vllm_config=vllm_config,
            prefix=join(self.prefix, "mlm_head"),
        )
        return splade_pooler(vllm_config, self.mlm_head)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        has_head = isinstance(self.mlm_head, MaskedLMHead)
        return super().load_weights(self._with_decoder(weights) if has_head else weights)

    def _with_decoder(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """With the decoder's tensors under its own names: its weight may be the embedding, and its
        bias may stand beside it."""
        seen = set()
        others: dict[str, Tensor] = {}
        for name, tensor in weights:
            final = name
            for pattern, replacement in self.renames:
                final = re.sub(pattern, replacement, final)
            if final == _EMBEDDING:
                others["weight"] = tensor
            if final == _BIAS:
                others["bias"] = tensor
                continue
            seen.add(final)
            yield name, tensor
        for part, tensor in others.items():
            if f"{_DECODER}{part}" not in seen:
                yield f"{_DECODER}{part}", tensor


class BertForMaskedLM(MaskedLM):
    takes_token_types = True
    renames: ClassVar[Renames] = (
        *BertEncoder.renames,
        (r"^cls\.predictions\.transform\.dense\.", "mlm_head.dense."),
        (r"^cls\.predictions\.transform\.LayerNorm\.", "mlm_head.norm."),
        (r"^cls\.predictions\.decoder\.", _DECODER),
        (r"^cls\.predictions\.bias$", _BIAS),
    )


class RobertaForMaskedLM(MaskedLM, RobertaEncoder):
    activation = "gelu"
    renames: ClassVar[Renames] = (
        *RobertaEncoder.renames,
        (r"^lm_head\.dense\.", "mlm_head.dense."),
        (r"^lm_head\.layer_norm\.", "mlm_head.norm."),
        (r"^lm_head\.decoder\.", _DECODER),
        (r"^lm_head\.bias$", _BIAS),
    )


class DistilBertForMaskedLM(MaskedLM, DistilBertEncoder):
    renames: ClassVar[Renames] = (
        *DistilBertEncoder.renames,
        (r"^vocab_transform\.", "mlm_head.dense."),
        (r"^vocab_layer_norm\.", "mlm_head.norm."),
        (r"^vocab_projector\.", _DECODER),
    )
