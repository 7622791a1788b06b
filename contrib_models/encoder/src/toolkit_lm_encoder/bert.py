"""BERT (Devlin et al. 2018): learned positions, and a layer norm after each half of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit_lm.attention import Attention, AttentionBias, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    LayerNorm,
    QKVParallelLinear,
    RowParallelLinear,
    join,
    make_layers,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_encoder.encoder import Embeddings, Encoder, FactorizedEmbeddings, Renames
from toolkit_lm_encoder.heads import DENSE, OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier


@dataclass(frozen=True, slots=True, kw_only=True)
class BertShape:
    """Sizes in config.json for an encoder of BERT's kind."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str
    eps: float
    max_positions: int
    position_offset: int = 0
    """Rows of the table of positions that stand before position 0."""
    num_types: int = 0
    embedding_size: int | None = None
    """Length of the tables' vectors, where a projection follows. None: hidden_size."""

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


class BertOutput(nn.Module):
    """Closes half a layer: x [T, size], residual [T, H] -> norm of (projection of x) + residual [T,
    H]."""

    def __init__(
        self, size: int, shape: BertShape, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.dense = RowParallelLinear(
            size,
            shape.hidden_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "dense"),
        )
        self.LayerNorm = LayerNorm(
            shape.hidden_size, eps=shape.eps, dtype=torch_dtype(vllm_config.model.dtype)
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.dense(x, residual))
        return out


class BertSelfAttention(nn.Module):
    """Bidirectional multi-head attention, without its last projection: x [T, H] -> [T, heads * head
    size]."""

    def __init__(
        self, shape: BertShape, *, bias: AttentionBias | None, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        heads = shape.num_heads
        self.qkv = QKVParallelLinear(
            shape.hidden_size,
            shape.head_size,
            heads,
            heads,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv"),
        )
        self.attn = Attention(
            self.qkv.num_heads,
            shape.head_size,
            type=AttentionType.ENCODER,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attn(*self.qkv(x).chunk(3, dim=-1))
        return out


class BertAttention(nn.Module):
    """The first half of a layer: x [T, H] -> [T, H]."""

    def __init__(
        self, shape: BertShape, *, bias: AttentionBias | None, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.self = BertSelfAttention(
            shape, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "self")
        )
        self.output = BertOutput(
            shape.hidden_size, shape, vllm_config=vllm_config, prefix=join(prefix, "output")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(self.self(x), x)
        return out


class BertIntermediate(nn.Module):
    """x [T, H] -> [T, intermediate size]."""

    def __init__(self, shape: BertShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        sizes = shape.hidden_size, shape.intermediate_size
        self.dense = ColumnParallelLinear(
            *sizes,
            bias=True,
            activation=shape.activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "dense"),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(x)
        return out


class BertLayer(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(
        self, shape: BertShape, *, bias: AttentionBias | None, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.attention = BertAttention(
            shape, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "attention")
        )
        self.intermediate = BertIntermediate(
            shape, vllm_config=vllm_config, prefix=join(prefix, "intermediate")
        )
        self.output = BertOutput(
            shape.intermediate_size, shape, vllm_config=vllm_config, prefix=join(prefix, "output")
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class BertLayers(nn.Module):
    """The layers that this pipeline rank owns: x [T, H] -> [T, H]."""

    def __init__(
        self, shape: BertShape, *, bias: AttentionBias | None, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.layer = make_layers(
            shape.num_layers,
            lambda prefix: BertLayer(shape, bias=bias, vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layer"),
            vllm_config.parallel,
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer.owned:
            x = layer(x)
        return x


class BertEncoder(Encoder):
    """BERT without a head. Families of its kind change the shape, and rename their weights to
    BERT's names."""

    packed = {"qkv": ("query", "key", "value")}
    renames: ClassVar[Renames] = (
        (r"^(bert|roberta)\.", ""),
        # Checkpoints that were converted from TensorFlow.
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        shape = self.shape(HFConfig(vllm_config.hf_config))
        self.encoder = self.make_layers(shape, join(prefix, "encoder"))

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        """Raises UnsupportedError for positions that are not learned."""
        if (kind := config.get("position_embedding_type", str, "absolute")) != "absolute":
            raise UnsupportedError(
                f"config.json: 'position_embedding_type' is {kind!r}. Supported: absolute."
            )
        return BertShape(
            hidden_size=config.require("hidden_size", int),
            num_layers=config.require("num_hidden_layers", int),
            num_heads=config.require("num_attention_heads", int),
            intermediate_size=config.require("intermediate_size", int),
            activation=config.get("hidden_act", str, "gelu"),
            eps=config.get("layer_norm_eps", float, 1e-12),
            max_positions=config.require("max_position_embeddings", int),
            num_types=config.get("type_vocab_size", int, 2),
        )

    def make_embeddings(self, config: HFConfig) -> Embeddings:
        shape = self.shape(config)
        sizes = [shape.hidden_size]
        kind: type[Embeddings] = Embeddings
        if shape.embedding_size is not None:
            sizes.insert(0, shape.embedding_size)
            kind = FactorizedEmbeddings
        return kind(
            *sizes,
            eps=shape.eps,
            max_positions=shape.max_positions,
            position_offset=shape.position_offset,
            num_types=shape.num_types,
            vllm_config=self.vllm_config,
            prefix=join(self.prefix, "embeddings"),
        )

    def make_layers(self, shape: BertShape, prefix: str) -> nn.Module:
        """The layers that this pipeline rank owns: x [T, H] -> [T, H]."""
        return BertLayers(
            shape, bias=self.make_bias(shape), vllm_config=self.vllm_config, prefix=prefix
        )

    def make_bias(self, shape: BertShape) -> AttentionBias | None:
        """Bias added to the scores of every layer; None: no bias."""
        return None

    def hidden_size(self, config: HFConfig) -> int:
        return self.shape(config).hidden_size

    def run_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.encoder(x)
        return out


class BertModel(Embedder, BertEncoder):
    takes_token_types = True


class BertForSequenceClassification(SequenceClassifier, BertEncoder):
    takes_token_types = True
    renames = (*BertEncoder.renames, OUT_PROJ, DENSE)


class BertForTokenClassification(TokenClassifier, BertEncoder):
    takes_token_types = True
    renames = (*BertEncoder.renames, OUT_PROJ)
