"""Nomic BERT, GTE and Jina embeddings 3: BERT with rotary positions, the first two with gated
feed-forwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    HFConfig,
    LayerNorm,
    QKVParallelLinear,
    Rotation,
    RowParallelLinear,
    join,
    make_layers,
    torch_dtype,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_encoder.encoder import Embeddings, Encoder, Renames, with_defaults
from toolkit_lm_encoder.heads import DENSE, OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier


class RotaryAttention(nn.Module):
    """Bidirectional multi-head attention: x [T, H] -> [T, H]."""

    def __init__(
        self, config: HFConfig, *, bias: bool, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = config.require("hidden_size", int)
        heads = config.require("num_attention_heads", int)
        head_size = config.get("head_dim", int, size // heads)
        self.qkv_proj = QKVParallelLinear(
            size,
            head_size,
            heads,
            heads,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.o_proj = RowParallelLinear(
            heads * head_size,
            size,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            head_size,
            type=AttentionType.ENCODER,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        for heads in (q, k):
            rotation.rotate(heads.view(-1, self.attn.params.num_heads, self.attn.params.head_size))
        out: Tensor = self.o_proj(self.attn(q, k, v), x)
        return out


class GatedMLP(nn.Module):
    """x [T, H] -> activation(gate) * up, projected, + x [T, H]."""

    def __init__(
        self, config: HFConfig, *, bias: bool, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = config.require("hidden_size", int)
        inner = config.require("intermediate_size", int)
        activation = config.require("hidden_act", str)
        self.gate_up_proj = GatedColumnParallelLinear(
            size,
            inner,
            activation=activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            inner, size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x), x)
        return out


class PlainMLP(nn.Module):
    """x [T, H] -> projected activation + x [T, H]."""

    def __init__(
        self, config: HFConfig, *, bias: bool, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = config.require("hidden_size", int)
        inner = config.require("intermediate_size", int)
        activation = config.require("hidden_act", str)
        self.fc1 = ColumnParallelLinear(
            size,
            inner,
            bias=bias,
            activation=activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "fc1"),
        )
        self.fc2 = RowParallelLinear(
            inner, size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "fc2")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x), x)
        return out


class RotaryLayer(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(
        self,
        config: HFConfig,
        mlp: type[GatedMLP | PlainMLP],
        *,
        attention_bias: bool,
        mlp_bias: bool,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.self_attn = RotaryAttention(
            config, bias=attention_bias, vllm_config=vllm_config, prefix=join(prefix, "self_attn")
        )
        self.post_attention_layernorm = self._norm(config, vllm_config)
        self.mlp = mlp(config, bias=mlp_bias, vllm_config=vllm_config, prefix=join(prefix, "mlp"))
        self.post_mlp_layernorm = self._norm(config, vllm_config)

    def _norm(self, config: HFConfig, vllm_config: VllmConfig) -> LayerNorm:
        size = config.require("hidden_size", int)
        eps = config.require("layer_norm_eps", float)
        return LayerNorm(size, eps=eps, dtype=torch_dtype(vllm_config.model.dtype))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = self.post_attention_layernorm(self.self_attn(x, rotation))
        out: Tensor = self.post_mlp_layernorm(self.mlp(x))
        return out


class RotaryEncoder(Encoder):
    """An encoder of this kind without a head. A family is made of these attributes."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    mlp: ClassVar[type[GatedMLP | PlainMLP]] = GatedMLP
    attention_bias: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = True
    """Whether the last projection of the MLP has a bias; without a gate, whether both have one."""
    defaults: ClassVar[dict[str, object]]
    """Values of config.json where it does not state them."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.read(HFConfig(vllm_config.hf_config))
        size = config.require("hidden_size", int)
        heads = config.require("num_attention_heads", int)
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda prefix: RotaryLayer(
                config,
                self.mlp,
                attention_bias=self.attention_bias,
                mlp_bias=self.mlp_bias,
                vllm_config=vllm_config,
                prefix=prefix,
            ),
            join(prefix, "layers"),
            vllm_config.parallel,
        )
        self.rotary = RotaryEmbedding(
            RopeParameters.read(config, config.get("head_dim", int, size // heads)),
            vllm_config=vllm_config,
        )

    @classmethod
    def read(cls, config: HFConfig) -> HFConfig:
        """`config` with the family's defaults."""
        return with_defaults(config, cls.defaults)

    def make_embeddings(self, config: HFConfig) -> Embeddings:
        config = self.read(config)
        return Embeddings(
            config.require("hidden_size", int),
            eps=config.require("layer_norm_eps", float),
            num_types=config.require("type_vocab_size", int),
            vllm_config=self.vllm_config,
            prefix=join(self.prefix, "embeddings"),
        )

    def hidden_size(self, config: HFConfig) -> int:
        return config.require("hidden_size", int)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(_halves(weights))

    def run_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        rotation = self.rotary(positions)
        for layer in self.layers.owned:
            x = layer(x, rotation)
        return x


def _halves(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """With up and gate apart, where the checkpoint has them in one tensor."""
    for name, tensor in weights:
        if ".up_gate_proj." in name:
            yield from zip(
                (name.replace("up_gate_proj", part) for part in ("up_proj", "gate_proj")),
                tensor.chunk(2),
                strict=True,
            )
        else:
            yield name, tensor


class NomicBertEncoder(RotaryEncoder):
    """Nomic BERT (Nussbaum et al. 2024)."""

    attention_bias = mlp_bias = False
    defaults = {
        "hidden_act": "silu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "rope_theta": 1000.0,
    }
    renames: ClassVar[Renames] = (
        (r"^nomic_bert\.", ""),
        (r"^encoder\.layers\.", "layers."),
        (r"^emb_ln\.", "embeddings.LayerNorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.fc11\.", ".mlp.up_proj."),
        (r"\.mlp\.fc12\.", ".mlp.gate_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    )


class NomicBertModel(Embedder, NomicBertEncoder):
    takes_token_types = True


class NomicBertForSequenceClassification(SequenceClassifier, NomicBertEncoder):
    takes_token_types = True
    renames = (*NomicBertEncoder.renames, OUT_PROJ, DENSE)


class NomicBertForTokenClassification(TokenClassifier, NomicBertEncoder):
    takes_token_types = True
    renames = (*NomicBertEncoder.renames, OUT_PROJ)


class GteEncoder(RotaryEncoder):
    """GTE (Zhang et al. 2024)."""

    defaults = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 1,
        "rope_theta": 160_000.0,
    }
    renames: ClassVar[Renames] = (
        (r"^(new|gte)\.", ""),
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.", ".self_attn."),
        (r"\.attn_ln\.", ".post_attention_layernorm."),
        (r"\.mlp_ln\.", ".post_mlp_layernorm."),
    )


class GteModel(Embedder, GteEncoder):
    takes_token_types = True


class GteForSequenceClassification(SequenceClassifier, GteEncoder):
    takes_token_types = True
    renames = (*GteEncoder.renames, OUT_PROJ, DENSE)


class GteForTokenClassification(TokenClassifier, GteEncoder):
    takes_token_types = True
    renames = (*GteEncoder.renames, OUT_PROJ)


class JinaEmbeddingsV3Encoder(RotaryEncoder):
    """Jina embeddings 3 (Sturua et al. 2024), as far as all of its tasks share it."""

    mlp = PlainMLP
    defaults = {
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 1,
        "rope_theta": 20_000.0,
    }
    renames: ClassVar[Renames] = (
        (r"^roberta\.", ""),
        (r"^emb_ln\.", "embeddings.LayerNorm."),
        (r"^encoder\.layers\.", "layers."),
        (r"\.mixer\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    )


class JinaEmbeddingsV3Model(Embedder, JinaEmbeddingsV3Encoder):
    pass


class JinaEmbeddingsV3ForSequenceClassification(SequenceClassifier, JinaEmbeddingsV3Encoder):
    pass


class JinaEmbeddingsV3ForTokenClassification(TokenClassifier, JinaEmbeddingsV3Encoder):
    renames = (*JinaEmbeddingsV3Encoder.renames, OUT_PROJ)
