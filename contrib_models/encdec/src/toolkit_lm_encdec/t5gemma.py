"""T5Gemma (Zhang et al. 2025): an encoder and a decoder that are Gemma 2, joined by cross
attention."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from toolkit_lm.attention import AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    HFConfig,
    Model,
    ParallelLMHead,
    RMSNorm,
    Rotation,
    VocabParallelEmbedding,
    choose_kernels,
    join,
    see_encoder_tokens,
)
from toolkit_lm.parts import EncoderPart
from toolkit_lm_decoder.gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2Model,
)
from toolkit_lm_decoder.llama import LlamaParts
from torch import Tensor, nn

from toolkit_lm_encdec.attention import PACKED, CrossAttention, Heads

Side = Literal["encoder", "decoder"]


def config_of(side: Side, vllm_config: VllmConfig) -> VllmConfig:
    """A copy whose config.json is that of one side. Raises CheckpointError where there is none."""
    values = HFConfig(vllm_config.hf_config).require(side, dict)
    assert vllm_config.checkpoint is not None
    vllm_config = vllm_config.with_checkpoint(
        msgspec.structs.replace(vllm_config.checkpoint, hf_config=values)
    )
    # The angles of an encoder's positions are those of its own longest sequence.
    longest = max(vllm_config.max_model_len, vllm_config.max_encoder_len)
    return vllm_config if side == "decoder" else vllm_config.replace(max_model_len=longest)


class EncoderAttention(Gemma2Attention):
    """Attention to both sides."""

    attention_type = AttentionType.ENCODER

    def window(self, config: HFConfig, layer: int) -> int | None:
        window = super().window(config, layer)
        # Stated is the greatest distance here, and the number of tokens in a decoder.
        return None if window is None else window + 1


class T5GemmaDecoderLayer(Gemma2DecoderLayer):
    """One layer, with cross attention in the middle: it takes encoder states, as CrossAttention
    does."""

    norms = (*Gemma2DecoderLayer.norms, "pre_cross_attn_layernorm", "post_cross_attn_layernorm")
    pre_cross_attn_layernorm: RMSNorm
    post_cross_attn_layernorm: RMSNorm

    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        attention = self.self_attn
        assert isinstance(attention, Gemma2Attention)
        heads = Heads(
            hidden_size=config.require("hidden_size", int),
            num_heads=config.require("num_attention_heads", int),
            num_kv_heads=config.get("num_key_value_heads", int),
            head_size=attention.head_size,
            scale=attention.attn.params.scale,
            soft_cap=attention.attn.params.soft_cap,
            encoder_size=config.get("cross_attention_hidden_size", int),
            has_biases=config.get("attention_bias", bool, False),
        )
        self.cross_attn = CrossAttention(
            heads, vllm_config=vllm_config, prefix=join(prefix, "cross_attn")
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        encoder_hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        # No kernel fuses a layer of this kind.
        out: tuple[Tensor, Tensor] = nn.Module.__call__(
            self, x, residual, rotation, encoder_hidden_states
        )
        return out

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        encoder_hidden_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.enter(x, residual)
        x, residual = self.pre_cross_attn_layernorm(
            self.post_attention_layernorm(self.self_attn(x, rotation)), residual
        )
        attended = self.cross_attn(x, None, encoder_hidden_states)
        x, residual = self.pre_feedforward_layernorm(
            self.post_cross_attn_layernorm(attended), residual
        )
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class T5GemmaDecoder(Gemma2Model):
    """The decoder: tokens [T] at positions [T], and encoder states as CrossAttention takes them ->
    hidden states [T, H]."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, encoder_hidden_states: Tensor | None
    ) -> Tensor:
        x = self.embed_input_ids(input_ids)
        residual = None
        for layer, rotation in zip(self.layers.owned, self.rotations(positions), strict=True):
            x, residual = layer(x, residual, rotation, encoder_hidden_states)
        out: Tensor = self.norm(x, residual)[0]
        return out


class EncoderParts(Gemma2ForCausalLM):
    """The classes that the encoder is made of."""

    attention = EncoderAttention


class DecoderParts(Gemma2ForCausalLM):
    """The classes that the decoder is made of."""

    layer = T5GemmaDecoderLayer


class T5GemmaModel(nn.Module):
    """The encoder and the decoder, which may be of different sizes."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.encoder = Gemma2Model(
            EncoderParts,
            vllm_config=config_of("encoder", vllm_config),
            prefix=join(prefix, "encoder"),
        )
        see_encoder_tokens(self.encoder)
        self.decoder = T5GemmaDecoder(
            DecoderParts,
            vllm_config=config_of("decoder", vllm_config),
            prefix=join(prefix, "decoder"),
        )


class T5GemmaForConditionalGeneration(Model):
    """T5Gemma with its language-modeling head."""

    parts = {"encoder": EncoderPart}
    packed = {**PACKED, "gate_up_proj": ("gate_proj", "up_proj")}
    renames = (
        (r"\.pre_self_attn_layernorm\.", ".input_layernorm."),
        (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
        (r"\.cross_attn\.o_proj\.", ".cross_attn.out_proj."),
        (r"^lm_head\.out_proj\.", "lm_head."),
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model = T5GemmaModel(vllm_config=vllm_config, prefix=join(prefix, "model"))
        config = HFConfig(config_of("decoder", vllm_config).hf_config)
        self.soft_cap = config.get("final_logit_softcapping", float)
        self.kernels = choose_kernels()
        is_tied = HFConfig(vllm_config.hf_config).get("tie_word_embeddings", bool, True)
        sizes = config.require("vocab_size", int), config.require("hidden_size", int)
        embedding: Any = self.model.decoder.embed_tokens
        tied_to: VocabParallelEmbedding | None = embedding if is_tied else None
        self.lm_head = ParallelLMHead(
            *sizes, tied_to=tied_to, vllm_config=vllm_config, prefix=join(prefix, "lm_head")
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.model.decoder.embed_input_ids(input_ids)
        return embedded

    def encode(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.model.encoder(input_ids, positions)
        return out

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.model.decoder(input_ids, positions, encoder_hidden_states)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits if self.soft_cap is None else self.kernels.soft_cap(logits, self.soft_cap)
