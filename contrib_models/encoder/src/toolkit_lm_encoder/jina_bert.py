"""Jina embeddings 2 (Günther et al. 2023): BERT with ALiBi in both directions and gated
feed-forwards."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from toolkit_lm.attention import AttentionBias
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    GatedColumnParallelLinear,
    HFConfig,
    Shard,
    join,
    make_layers,
)
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertAttention, BertEncoder, BertOutput, BertShape
from toolkit_lm_encoder.encoder import Renames
from toolkit_lm_encoder.heads import DENSE, OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier

ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
"""Activation of the gate, by `feed_forward_type`."""


def alibi_slopes(num_heads: int) -> list[float]:
    """Slope of each head (Press et al. 2022): a geometric series, of which heads beyond a power of
    two take every second number of the next longer one."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = 2.0 ** (-8 / power)
    slopes = [first ** (head + 1) for head in range(power)]
    if power < num_heads:
        slopes += alibi_slopes(2 * power)[::2][: num_heads - power]
    return slopes


class SymmetricAlibi:
    """Query positions [Tq], key positions [Tk] -> bias [heads, Tq, Tk]: minus a head's slope times
    the distance."""

    def __init__(self, num_heads: int, vllm_config: VllmConfig) -> None:
        heads = Shard.even(num_heads, vllm_config.parallel, "attention heads")
        self.slopes = torch.tensor(alibi_slopes(num_heads)[heads.start : heads.start + heads.size])

    def __call__(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        return self._at((q_positions[:, None] - k_positions).abs())

    def by_offset(self, most: int) -> Tensor:
        """[heads, 2 * most + 1]."""
        return self._at(torch.arange(-most, most + 1, device=self.slopes.device).abs())

    def _at(self, distances: Tensor) -> Tensor:
        return -self.slopes.view(-1, *[1] * distances.dim()) * distances


class JinaBertMLP(nn.Module):
    """Gated feed-forward, which closes a layer: x [T, H] -> [T, H]."""

    def __init__(
        self, shape: BertShape, activation: str, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.gated_layers = GatedColumnParallelLinear(
            shape.hidden_size,
            shape.intermediate_size,
            activation=activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "gated_layers"),
        )
        self.output = BertOutput(
            shape.intermediate_size, shape, vllm_config=vllm_config, prefix=join(prefix, "output")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.gated_layers(x), x)
        return out


class JinaBertLayer(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(
        self,
        shape: BertShape,
        activation: str,
        *,
        bias: AttentionBias | None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.attention = BertAttention(
            shape, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "attention")
        )
        self.mlp = JinaBertMLP(
            shape, activation, vllm_config=vllm_config, prefix=join(prefix, "mlp")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.attention(x))
        return out


class JinaBertLayers(nn.Module):
    """The layers that this pipeline rank owns: x [T, H] -> [T, H]."""

    def __init__(
        self,
        shape: BertShape,
        activation: str,
        *,
        bias: AttentionBias | None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.layer = make_layers(
            shape.num_layers,
            lambda prefix: JinaBertLayer(
                shape, activation, bias=bias, vllm_config=vllm_config, prefix=prefix
            ),
            join(prefix, "layer"),
            vllm_config.parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer.owned:
            x = layer(x)
        return x


class JinaBertEncoder(BertEncoder):
    """Jina embeddings 2 without a head."""

    renames: ClassVar[Renames] = (
        *BertEncoder.renames,
        (r"\.mlp\.wo\.", ".mlp.output.dense."),
        (r"\.mlp\.layernorm\.", ".mlp.output.LayerNorm."),
    )

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        """Raises UnsupportedError for positions other than ALiBi."""
        if (kind := config.get("position_embedding_type", str, "absolute")) != "alibi":
            raise UnsupportedError(
                f"config.json: 'position_embedding_type' is {kind!r}. Supported by this class: "
                "alibi."
            )
        # ALiBi needs no table of positions.
        values = {**config.values, "position_embedding_type": None, "max_position_embeddings": 0}
        return super().shape(HFConfig(values))

    def make_bias(self, shape: BertShape) -> AttentionBias | None:
        return SymmetricAlibi(shape.num_heads, self.vllm_config)

    def make_layers(self, shape: BertShape, prefix: str) -> nn.Module:
        config = HFConfig(self.vllm_config.hf_config)
        kind = config.get("feed_forward_type", str, "original")
        if kind not in ACTIVATIONS:
            raise UnsupportedError(
                f"config.json: 'feed_forward_type' is {kind!r}. Supported: "
                f"{', '.join(ACTIVATIONS)}."
            )
        return JinaBertLayers(
            shape,
            ACTIVATIONS[kind],
            bias=self.make_bias(shape),
            vllm_config=self.vllm_config,
            prefix=prefix,
        )


class JinaBertModel(Embedder, JinaBertEncoder):
    takes_token_types = True


class JinaBertForSequenceClassification(SequenceClassifier, JinaBertEncoder):
    takes_token_types = True
    renames = (*JinaBertEncoder.renames, OUT_PROJ, DENSE)


class JinaBertForTokenClassification(TokenClassifier, JinaBertEncoder):
    takes_token_types = True
    renames = (*JinaBertEncoder.renames, OUT_PROJ)
