"""Llama, and the parts that decoder families of its kind share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.bypass import Bypassable, module_alteration
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    Absent,
    FusibleLayer,
    GatedColumnParallelLinear,
    HFConfig,
    IntermediateTensors,
    LayerParts,
    QKVParallelLinear,
    RMSNorm,
    Rotation,
    RowParallelLinear,
    join,
    layer_index,
    make_layers,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor, nn

from toolkit_lm_decoder.causal_lm import CausalLM, Decoder
from toolkit_lm_decoder.dense import dense

LAYER_TYPES = ("full_attention", "sliding_attention")


def head_size_of(config: HFConfig) -> int:
    """`head_dim`, or hidden_size over heads where it is not stated."""
    return config.get("head_dim", int) or config.require("hidden_size", int) // config.require(
        "num_attention_heads", int
    )


def eps_of(config: HFConfig) -> float:
    """Epsilon that keeps norms from dividing by zero."""
    return config.get("rms_norm_eps", float, 1e-6)


def layer_window(config: HFConfig, layer: int, *, otherwise: bool) -> int | None:
    """`sliding_window` if `layer_types` calls the layer "sliding_attention". Without `layer_types`,
    `otherwise` decides."""
    kinds = config.get("layer_types", list)
    if kinds is None:
        is_windowed = otherwise
    elif layer < len(kinds) and kinds[layer] in LAYER_TYPES:
        is_windowed = kinds[layer] == "sliding_attention"
    else:
        known = ", ".join(LAYER_TYPES)
        found = kinds[layer] if layer < len(kinds) else None
        raise CheckpointError(
            f"config.json: 'layer_types' must name one of {known} for layer {layer}, not {found!r}."
        )
    return config.require("sliding_window", int) if is_windowed else None


def norm_of(config: HFConfig, vllm_config: VllmConfig, kind: type[RMSNorm]) -> RMSNorm:
    """A norm of the hidden states."""
    return kind(config.require("hidden_size", int), eps=eps_of(config), vllm_config=vllm_config)


class LlamaAttention(Bypassable):
    """Grouped-query self-attention: x [T, H] -> [T, H]."""

    seams = frozenset(
        {
            "attention_type",
            "has_qkv_bias",
            "has_output_bias",
            "scale",
            "window",
            "soft_cap",
            "sinks",
            "head_norms",
        }
    )
    """Methods that a family may override and stay fusible (see `Bypassable`): `LayerParts` hold the
    values that they give."""
    attention_type: ClassVar[AttentionType] = AttentionType.DECODER

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        num_heads = config.require("num_attention_heads", int)
        self.head_size = head_size_of(config)
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            self.head_size,
            num_heads,
            config.get("num_key_value_heads", int, num_heads),
            bias=self.has_qkv_bias(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.o_proj = RowParallelLinear(
            num_heads * self.head_size,
            hidden_size,
            bias=self.has_output_bias(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        self.sizes = (self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size)
        self.rotated_size = self.qkv_proj.q_size + self.qkv_proj.kv_size
        self.attn = Attention(
            self.qkv_proj.num_heads,
            self.head_size,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            type=self.attention_type,
            scale=self.scale(config),
            window=self.window(config, layer_index(prefix)),
            soft_cap=self.soft_cap(config),
            sinks=self.sinks(vllm_config),
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def has_qkv_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", bool, False)

    def has_output_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", bool, False)

    def scale(self, config: HFConfig) -> float | None:
        """Factor that scores are multiplied by; None: head_size ** -0.5."""
        return None

    def window(self, config: HFConfig, layer: int) -> int | None:
        """How many tokens a token sees, itself counted; None: all before it."""
        return None

    def soft_cap(self, config: HFConfig) -> float | None:
        """Soft cap of scores; None: no cap."""
        return None

    def sinks(self, vllm_config: VllmConfig) -> nn.Parameter | None:
        """A logit per head of this rank, which joins the softmax's denominator; None: no sinks."""
        return None

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        """Norms of queries and of keys before rotation, per head or over all heads together; None:
        no norms."""
        return None

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values."""
        qkv = self.qkv_proj(x)
        q, k, v = qkv.split(self.sizes, dim=-1)
        if (norms := self.head_norms()) is None:
            # Queries and keys lie side by side, so one rotation serves both.
            rotation.rotate(qkv[:, : self.rotated_size].view(len(qkv), -1, self.head_size))
            return q, k, v
        q, k = (self._normed(part, norm) for part, norm in zip((q, k), norms, strict=True))
        return rotation.rotate(q), rotation.rotate(k), v

    def _normed(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [T, heads * head_size] in as many pieces as the norm's weight is long -> [T, heads,
        head_size]."""
        normed: Tensor = norm(x.view(len(x), -1, len(norm.weight)))
        return normed.reshape(len(x), -1, self.head_size)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        out: Tensor = self.o_proj(self.attn(*self.project(x, rotation)))
        return out


class LlamaMLP(Bypassable):
    """Gated feed-forward: x [T, H] -> [T, H]."""

    seams = frozenset({"activation", "inner_size"})

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        inner_size = self.inner_size(config, layer_index(prefix))
        bias = config.get("mlp_bias", bool, False)
        self.gate_up_proj = GatedColumnParallelLinear(
            hidden_size,
            inner_size,
            activation=self.activation(config),
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "gate_up_proj"),
        )
        self.down_proj = RowParallelLinear(
            inner_size,
            hidden_size,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "down_proj"),
        )

    def activation(self, config: HFConfig) -> str:
        return config.get("hidden_act", str, "silu")

    def inner_size(self, config: HFConfig, layer: int) -> int:
        return config.require("intermediate_size", int)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x))
        return out


class LlamaDecoderLayer(FusibleLayer):
    """One layer. The residual is passed separately from the hidden states, so that each addition
    can be fused with the norm after it.

    A subclass with a different forward pass states its own `seams`, if its `parts` describe that
    pass fully."""

    seams = frozenset({"norms", "parts"})
    norms: ClassVar[tuple[str, ...]] = ("input_layernorm", "post_attention_layernorm")
    """Names of the layer's norms of hidden states."""
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        for name in self.norms:
            self.add_module(name, norm_of(config, vllm_config, parts.norm))
        self.self_attn = parts.attention(vllm_config=vllm_config, prefix=join(prefix, "self_attn"))
        self.mlp = parts.feed_forward(vllm_config=vllm_config, prefix=join(prefix, "mlp"))

    def parts(self) -> LayerParts | None:
        return self.parts_of(
            input_norm=self.input_layernorm, post_norm=self.post_attention_layernorm
        )

    def parts_of(
        self, *, input_norm: RMSNorm | None, post_norm: RMSNorm | None, **own: Any
    ) -> LayerParts | None:
        """The layer's parts, `own` among them. None: its attention is of another kind than
        LlamaAttention, or no decoder's."""
        attention = self.self_attn
        mlp = self.mlp
        if (
            not isinstance(attention, LlamaAttention)
            or attention.attention_type is not AttentionType.DECODER
        ):
            return None
        # A feed-forward that computes in its own way is called.
        gated = mlp if isinstance(mlp, LlamaMLP) and module_alteration(mlp) is None else None
        return LayerParts(
            input_norm=input_norm,
            qkv=attention.qkv_proj,
            head_norms=attention.head_norms(),
            attn=attention.attn,
            out=attention.o_proj,
            post_norm=post_norm,
            gate_up=None if gated is None else gated.gate_up_proj,
            down=None if gated is None else gated.down_proj,
            feed_forward=mlp if gated is None else None,
            **own,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.enter(x, residual)
        x = self.self_attn(x, rotation)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def enter(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Attention's input, and the residual. The first layer gets None as its residual."""
        if residual is None:
            return self.input_layernorm(x), x
        out: tuple[Tensor, Tensor] = self.input_layernorm(x, residual)
        return out


class LlamaModel(Decoder):
    """The embedding, the layers and the last norm.

    `inputs_embeds` may be wider than the hidden size H: columns from H on are what is added after
    the first layers, H columns for each (DeepStack, Meng et al. 2024).
    """

    embed_tokens: nn.Module

    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.hidden_size = config.require("hidden_size", int)
        self.rotary = self._rotary(config)
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda prefix: parts.layer(parts, vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layers"),
            vllm_config.parallel,
        )
        self.norm = norm_of(config, vllm_config, parts.norm) if self.is_last else Absent()

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return RotaryEmbedding(
            RopeParameters.read(config, head_size_of(config)), vllm_config=self.vllm_config
        )

    def split_embeds(self, x: Tensor) -> list[Tensor]:
        """Hidden states before the first layer [T, H], and those to add after each of the first
        layers."""
        if x.shape[-1] == self.hidden_size:
            return [x]
        return [dense(part) for part in torch.split(x, self.hidden_size, dim=-1)]

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """The rotation of tokens at positions [T], for each layer that this rank owns."""
        return [self.rotary(positions)] * len(self.layers.owned)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        residual: Tensor | None
        if intermediate is not None:
            x = intermediate["hidden_states"]
            residual = intermediate["residual"]
        else:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        x, *deep = self.split_embeds(x)
        for index, rotation in enumerate(self.rotations(positions)):
            x, residual = self.layers.owned[index](x, residual, rotation)
            if index < len(deep):
                x = x + deep[index]
        if not self.is_last:
            assert residual is not None, "a pipeline rank without layers"
            return {"hidden_states": x, "residual": residual}
        out: Tensor = self.norm(x, residual)[0]
        return out


class LlamaParts:
    """The classes that a model of this kind is made of. A family names those that are its own."""

    attention: ClassVar[type[nn.Module]] = LlamaAttention
    feed_forward: ClassVar[Callable[..., nn.Module]] = LlamaMLP
    norm: ClassVar[type[RMSNorm]] = RMSNorm
    """Norm class for hidden states."""
    layer: ClassVar[Callable[..., nn.Module]] = LlamaDecoderLayer
    decoder: ClassVar[type[LlamaModel]] = LlamaModel
    vllm_config: VllmConfig

    def make_decoder(self, prefix: str) -> LlamaModel:
        return self.decoder(type(self), vllm_config=self.vllm_config, prefix=prefix)


class LlamaForCausalLM(LlamaParts, CausalLM):
    """Llama with its language-modeling head."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    ignored = (r"rotary_emb\.inv_freq$",)
