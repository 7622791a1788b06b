"""ModernBERT (Warner et al. 2024): rotary positions, norms first, and layers that see a window or
everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    Absent,
    GatedColumnParallelLinear,
    HFConfig,
    LayerNorm,
    QKVParallelLinear,
    Rotation,
    RowParallelLinear,
    VocabParallelEmbedding,
    join,
    layer_index,
    make_layers,
    torch_dtype,
)
from toolkit_lm_poolers import num_labels_of
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_encoder.encoder import Encoder, Renames
from toolkit_lm_encoder.heads import (
    OUT_PROJ,
    ClassificationHead,
    Embedder,
    SequenceClassifier,
    TokenClassifier,
)

FULL = "full_attention"
SLIDING = "sliding_attention"
THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""The key under which older checkpoints state the rotary base of each kind of layer, and its
default."""


def layer_norm(config: HFConfig, dtype: torch.dtype) -> LayerNorm:
    eps = config.get("norm_eps", float, 1e-5)
    bias = config.get("norm_bias", bool, False)
    return LayerNorm(config.require("hidden_size", int), eps=eps, bias=bias, dtype=dtype)


def layer_kind(config: HFConfig, layer: int) -> str:
    """Raises CheckpointError for a kind of layer that there is not."""
    kinds = config.get("layer_types", list)
    if kinds is None:
        return SLIDING if layer % config.get("global_attn_every_n_layers", int, 3) else FULL
    kind = kinds[layer] if layer < len(kinds) else None
    if kind not in THETAS:
        raise CheckpointError(
            f"config.json: 'layer_types' must have one of {FULL}, {SLIDING} for layer {layer}, "
            f"not {kind!r}."
        )
    return str(kind)


def rope_parameters(config: HFConfig, kind: str) -> RopeParameters:
    nothing: dict[str, Any] = {}
    rope = config.get("rope_parameters", dict, nothing).get(kind)
    key, default = THETAS[kind]
    values = {
        "rope_theta": config.get(key, float, default),
        **(rope if isinstance(rope, Mapping) else nothing),
    }
    values |= config.get("rope_scaling", dict, nothing)
    head_size = config.require("hidden_size", int) // config.require("num_attention_heads", int)
    return RopeParameters.read(
        HFConfig({**config.values, "rope_parameters": values, "rope_scaling": None}), head_size
    )


class ModernBertEmbeddings(nn.Module):
    """Token ids [T] -> [T, H]."""

    def __init__(self, config: HFConfig, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        sizes = config.require("vocab_size", int), config.require("hidden_size", int)
        self.tok_embeddings = VocabParallelEmbedding(
            *sizes, vllm_config=vllm_config, prefix=join(prefix, "tok_embeddings")
        )
        self.norm = layer_norm(config, torch_dtype(vllm_config.model.dtype))

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None
    ) -> Tensor:
        x: Tensor = self.norm(self.tok_embeddings(input_ids))
        return x


class ModernBertAttention(nn.Module):
    """Bidirectional multi-head attention: x [T, H] -> [T, H]."""

    def __init__(
        self, config: HFConfig, kind: str, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        size = config.require("hidden_size", int)
        heads = config.require("num_attention_heads", int)
        bias = config.get("attention_bias", bool, False)
        self.Wqkv = QKVParallelLinear(
            size,
            size // heads,
            heads,
            heads,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "Wqkv"),
        )
        self.Wo = RowParallelLinear(
            size, size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "Wo")
        )
        # `local_attention` counts the tokens of both sides; a token sees those at a distance of up
        # to the half.
        window = config.get("local_attention", int, 128) // 2 + 1
        self.attn = Attention(
            self.Wqkv.num_heads,
            size // heads,
            type=AttentionType.ENCODER,
            window=window if kind == SLIDING else None,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        q, k, v = self.Wqkv(x).chunk(3, dim=-1)
        for heads in (q, k):
            rotation.rotate(heads.view(-1, self.attn.params.num_heads, self.attn.params.head_size))
        out: Tensor = self.Wo(self.attn(q, k, v))
        return out


class ModernBertMLP(nn.Module):
    """Gated feed-forward: x [T, H] -> [T, H]."""

    def __init__(self, config: HFConfig, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = config.require("hidden_size", int)
        inner = config.require("intermediate_size", int)
        bias = config.get("mlp_bias", bool, False)
        activation = config.get("hidden_activation", str, "gelu")
        self.Wi = GatedColumnParallelLinear(
            size,
            inner,
            activation=activation,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "Wi"),
        )
        self.Wo = RowParallelLinear(
            inner, size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "Wo")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.Wo(self.Wi(x))
        return out


class ModernBertLayer(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(self, config: HFConfig, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        layer = layer_index(prefix)
        dtype = torch_dtype(vllm_config.model.dtype)
        self.kind = layer_kind(config, layer)
        # The embeddings are normed already.
        self.attn_norm = layer_norm(config, dtype) if layer else nn.Identity()
        self.attn = ModernBertAttention(
            config, self.kind, vllm_config=vllm_config, prefix=join(prefix, "attn")
        )
        self.mlp_norm = layer_norm(config, dtype)
        self.mlp = ModernBertMLP(config, vllm_config=vllm_config, prefix=join(prefix, "mlp"))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        x = x + self.attn(self.attn_norm(x), rotation)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class ModernBertEncoder(Encoder):
    """ModernBERT without a head."""

    renames: ClassVar[Renames] = ((r"^model\.", ""),)
    ignored: ClassVar[Sequence[str]] = (*Encoder.ignored, r"^(head|decoder)\.")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda prefix: ModernBertLayer(config, vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layers"),
            vllm_config.parallel,
        )
        self.final_norm = (
            layer_norm(config, torch_dtype(vllm_config.model.dtype)) if self.is_last else Absent()
        )
        self.rotary = nn.ModuleDict(
            {
                kind: RotaryEmbedding(rope_parameters(config, kind), vllm_config=vllm_config)
                for kind in THETAS
            }
        )

    def make_embeddings(self, config: HFConfig) -> ModernBertEmbeddings:
        return ModernBertEmbeddings(
            config, vllm_config=self.vllm_config, prefix=join(self.prefix, "embeddings")
        )

    def hidden_size(self, config: HFConfig) -> int:
        return config.require("hidden_size", int)

    def run_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        rotations = {kind: rotary(positions) for kind, rotary in self.rotary.items()}
        for layer in self.layers.owned:
            assert isinstance(layer, ModernBertLayer)
            x = layer(x, rotations[layer.kind])
        out: Tensor = self.final_norm(x) if self.is_last else x
        return out


HEAD = (OUT_PROJ, (r"^head\.", "classifier."))
"""The names of the classifier's parts."""


def modern_head(config: HFConfig) -> ClassificationHead:
    return ClassificationHead(
        config.require("hidden_size", int),
        num_labels_of(dict(config.values)),
        activation=config.get("classifier_activation", str, "gelu"),
        bias=config.get("classifier_bias", bool, False),
        norm=layer_norm(config, torch.float32),
    )


class ModernBertModel(Embedder, ModernBertEncoder):
    pass


class ModernBertForSequenceClassification(SequenceClassifier, ModernBertEncoder):
    renames = (*ModernBertEncoder.renames, *HEAD)

    def make_classifier(self, config: HFConfig) -> ClassificationHead:
        return modern_head(config)

    def pooling(self, config: HFConfig) -> str:
        return config.get("classifier_pooling", str, "cls").upper()


class ModernBertForTokenClassification(TokenClassifier, ModernBertEncoder):
    renames = (*ModernBertEncoder.renames, *HEAD)

    def make_classifier(self, config: HFConfig) -> ClassificationHead:
        return modern_head(config)
