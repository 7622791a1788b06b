"""BART (Lewis et al. 2019) and its relatives: mBART, Pegasus and Marian. They differ in their norms
and in their positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from toolkit_lm.attention import AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    LayerNorm,
    Model,
    ParallelLMHead,
    RowParallelLinear,
    VocabParallelEmbedding,
    join,
    logits_of,
    see_encoder_tokens,
    torch_dtype,
)
from toolkit_lm.parts import EncoderPart
from torch import Tensor, nn

from toolkit_lm_encdec.attention import PACKED, CrossAttention, Heads, SelfAttention
from toolkit_lm_encdec.positions import LearnedPositions, Positions, SinusoidalPositions
from toolkit_lm_encdec.substitutes import with_substitutes

Side = Literal["encoder", "decoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Differences between the families."""

    norms_first: bool = False
    """Each part of a layer begins with its norm, and a norm ends the stack; otherwise a norm ends
    each part."""
    norms_embeddings: bool = True
    positions: type[Positions] = LearnedPositions


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes in config.json for the encoder or the decoder."""

    heads: Heads
    num_layers: int
    inner_size: int
    activation: str
    style: Style

    @classmethod
    def read(cls, config: HFConfig, side: Side, style: Style) -> Shape:
        size = config.require("d_model", int)
        num_heads = config.require(f"{side}_attention_heads", int)
        head_size = size // num_heads
        return cls(
            heads=Heads(
                hidden_size=size,
                num_heads=num_heads,
                head_size=head_size,
                scale=head_size**-0.5,
                has_biases=True,
            ),
            num_layers=config.require(f"{side}_layers", int),
            inner_size=config.require(f"{side}_ffn_dim", int),
            activation=config.get("activation_function", str, "gelu"),
            style=style,
        )


class BartLayer(nn.Module):
    """Common part of encoder and decoder layers."""

    attention_type: ClassVar[AttentionType]

    def __init__(self, shape: Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = shape.heads.hidden_size
        inner = shape.inner_size
        dtype = torch_dtype(vllm_config.model.dtype)
        self.norms_first = shape.style.norms_first
        self.self_attn = SelfAttention(
            shape.heads,
            type=self.attention_type,
            vllm_config=vllm_config,
            prefix=join(prefix, "self_attn"),
        )
        self.self_attn_layer_norm = LayerNorm(size, dtype=dtype)
        self.fc1 = ColumnParallelLinear(
            size,
            inner,
            bias=True,
            activation=shape.activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "fc1"),
        )
        self.fc2 = RowParallelLinear(
            inner, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "fc2")
        )
        self.final_layer_norm = LayerNorm(size, dtype=dtype)

    def attend(self, x: Tensor) -> Tensor:
        """The part that sees the sequence itself: x [T, H] -> [T, H]."""
        norm = self.self_attn_layer_norm
        attention = self.self_attn
        out: Tensor = attention(norm(x), x) if self.norms_first else norm(attention(x, x))
        return out

    def feed_forward(self, x: Tensor) -> Tensor:
        """The last part: x [T, H] -> [T, H]."""
        norm = self.final_layer_norm
        first = self.fc1
        second = self.fc2
        out: Tensor = second(first(norm(x)), x) if self.norms_first else norm(second(first(x), x))
        return out


class BartEncoderLayer(BartLayer):
    """One layer: x [E, H] -> [E, H]."""

    attention_type = AttentionType.ENCODER

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attend(x))


class BartDecoderLayer(BartLayer):
    """One layer: x [T, H], and encoder states as CrossAttention takes them -> [T, H]."""

    attention_type = AttentionType.DECODER

    def __init__(self, shape: Shape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(shape, vllm_config=vllm_config, prefix=prefix)
        self.encoder_attn = CrossAttention(
            shape.heads, vllm_config=vllm_config, prefix=join(prefix, "encoder_attn")
        )
        self.encoder_attn_layer_norm = LayerNorm(
            shape.heads.hidden_size, dtype=torch_dtype(vllm_config.model.dtype)
        )

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None) -> Tensor:
        x, norm, states = self.attend(x), self.encoder_attn_layer_norm, encoder_hidden_states
        x = (
            self.encoder_attn(norm(x), x, states)
            if self.norms_first
            else norm(self.encoder_attn(x, x, states))
        )
        return self.feed_forward(x)


class BartStack(nn.Module):
    """The encoder, or the decoder: tokens [T] at positions [T], and what its layers take besides ->
    hidden states [T, H]. `inputs_embeds` [T, H] replace the embeddings of the tokens."""

    def __init__(
        self,
        side: Side,
        style: Style,
        embed_tokens: VocabParallelEmbedding,
        *,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        dtype = torch_dtype(vllm_config.model.dtype)
        shape = Shape.read(config, side, style)
        size = shape.heads.hidden_size
        layer = BartDecoderLayer if side == "decoder" else BartEncoderLayer
        self.embed_tokens = embed_tokens
        self.embed_positions = style.positions(
            config.require("max_position_embeddings", int), size, dtype=dtype
        )
        self.layernorm_embedding = (
            LayerNorm(size, dtype=dtype) if style.norms_embeddings else nn.Identity()
        )
        self.layers = nn.ModuleList(
            layer(shape, vllm_config=vllm_config, prefix=join(prefix, f"layers.{i}"))
            for i in range(shape.num_layers)
        )
        self.layer_norm = LayerNorm(size, dtype=dtype) if style.norms_first else nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *inputs: Tensor | None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x = self.layernorm_embedding(x + self.embed_positions(positions))
        for layer in self.layers:
            x = layer(x, *inputs)
        out: Tensor = self.layer_norm(x)
        return out


class BartModel(nn.Module):
    """The encoder and the decoder, with one embedding, or with one each."""

    def __init__(
        self, style: Style, *, shares_embedding: bool, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("d_model", int)
        vocab_size = config.require("vocab_size", int)
        scale = size**0.5 if config.get("scale_embedding", bool, False) else 1.0

        def embedding(vocab_size: int, name: str) -> VocabParallelEmbedding:
            return VocabParallelEmbedding(
                vocab_size, size, scale=scale, vllm_config=vllm_config, prefix=join(prefix, name)
            )

        if shares_embedding:
            self.shared = encoder_embedding = decoder_embedding = embedding(vocab_size, "shared")
        else:
            encoder_embedding = embedding(vocab_size, "encoder.embed_tokens")
            decoder_embedding = embedding(target_vocab_size(config), "decoder.embed_tokens")
        self.encoder = BartStack(
            "encoder",
            style,
            encoder_embedding,
            vllm_config=vllm_config,
            prefix=join(prefix, "encoder"),
        )
        see_encoder_tokens(self.encoder)
        self.decoder = BartStack(
            "decoder",
            style,
            decoder_embedding,
            vllm_config=vllm_config,
            prefix=join(prefix, "decoder"),
        )


class BartForConditionalGeneration(Model):
    """BART with its language-modeling head."""

    parts = {"encoder": EncoderPart}
    packed = PACKED
    # Buffers of older files, and an embedding that is not used where each side has its own.
    ignored = (r"^model\.(encoder|decoder)\.version$", r"^model\.shared\.weight$")
    style: ClassVar[Style] = Style()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        is_tied = config.get("tie_word_embeddings", bool, True)
        shares = is_tied and has_one_vocabulary(config)
        self.model = BartModel(
            self.style,
            shares_embedding=shares,
            vllm_config=vllm_config,
            prefix=join(prefix, "model"),
        )
        self.style.positions.check(config.require("max_position_embeddings", int), vllm_config)
        self.lm_head = ParallelLMHead(
            target_vocab_size(config),
            config.require("d_model", int),
            bias=True,
            tied_to=self.model.decoder.embed_tokens if is_tied else None,
            vllm_config=vllm_config,
            prefix=join(prefix, "lm_head"),
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.decoder.embed_tokens(input_ids)
        return embedded

    def encode(
        self, input_ids: Tensor, positions: Tensor, *, inputs_embeds: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.model.encoder(input_ids, positions, inputs_embeds=inputs_embeds)
        return out

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.model.decoder(input_ids, positions, encoder_hidden_states)
        return out

    @logits_of("lm_head")
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        substitutes: dict[str, str | Tensor] = {
            "lm_head.bias": torch.zeros(self.lm_head.vocab_size, device="cpu")
        }
        for name, stack in (("encoder", self.model.encoder), ("decoder", self.model.decoder)):
            substitutes[f"model.{name}.embed_tokens.weight"] = "model.shared.weight"
            if (table := stack.embed_positions.substitute()) is not None:
                substitutes[f"model.{name}.embed_positions.weight"] = table
        return super().load_weights(with_substitutes(_named(weights), substitutes))


class MBartForConditionalGeneration(BartForConditionalGeneration):
    """mBART and mBART-50 (Liu et al. 2020)."""

    style = Style(norms_first=True)


class PegasusForConditionalGeneration(BartForConditionalGeneration):
    """Pegasus (Zhang et al. 2019)."""

    style = Style(norms_first=True, norms_embeddings=False, positions=SinusoidalPositions)


class MarianMTModel(BartForConditionalGeneration):
    """Marian (Junczys-Dowmunt et al. 2018), the OPUS-MT models. The languages may have an embedding
    each."""

    style = Style(norms_embeddings=False, positions=SinusoidalPositions)


def has_one_vocabulary(config: HFConfig) -> bool:
    """Whether both sides know the same tokens."""
    return config.get("share_encoder_decoder_embeddings", bool, True)


def target_vocab_size(config: HFConfig) -> int:
    """Tokens that the decoder knows."""
    size = config.require("vocab_size", int)
    return size if has_one_vocabulary(config) else config.get("decoder_vocab_size", int, size)


def _named(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """With the names that a model with a head has, whose bias is stated apart, [1, V]."""
    for name, tensor in weights:
        if name == "final_logits_bias":
            yield "lm_head.bias", tensor.flatten()
        else:
            yield (name if name.startswith(("model.", "lm_head.")) else f"model.{name}"), tensor
