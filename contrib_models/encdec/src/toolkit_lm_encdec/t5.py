"""T5 (Raffel et al. 2019) and its relatives: T5 1.1, FLAN-T5, mT5. Positions are a bias of
attention scores by distance."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from toolkit_lm.attention import AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    HFConfig,
    Model,
    ParallelLMHead,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    join,
    see_encoder_tokens,
)
from toolkit_lm.parts import EncoderPart
from torch import Tensor, nn

from toolkit_lm_encdec.attention import PACKED, CrossAttention, Heads, SelfAttention
from toolkit_lm_encdec.relative_bias import RelativeBias
from toolkit_lm_encdec.substitutes import with_substitutes


def heads_of(config: HFConfig) -> Heads:
    """Scores are not scaled: the weights have taken it up."""
    size, num_heads, head_size = (
        config.require(key, int) for key in ("d_model", "num_heads", "d_kv")
    )
    return Heads(
        hidden_size=size, num_heads=num_heads, head_size=head_size, scale=1.0, has_biases=False
    )


def norm_of(config: HFConfig, vllm_config: VllmConfig) -> RMSNorm:
    return RMSNorm(
        config.require("d_model", int),
        eps=config.get("layer_norm_epsilon", float, 1e-6),
        vllm_config=vllm_config,
    )


class T5MLP(nn.Module):
    """Feed-forward, which may be gated: x [T, H], residual [T, H] -> their sum [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("d_model", int)
        inner = config.require("d_ff", int)
        activation, is_gated = feed_forward_kind(config)
        name, kind = (
            ("wi_0_1", GatedColumnParallelLinear) if is_gated else ("wi", ColumnParallelLinear)
        )
        self.wi_name = name
        self.add_module(
            name,
            kind(
                size,
                inner,
                activation=activation,
                vllm_config=vllm_config,
                prefix=join(prefix, name),
            ),
        )
        self.wo = RowParallelLinear(inner, size, vllm_config=vllm_config, prefix=join(prefix, "wo"))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.wo(self.get_submodule(self.wi_name)(x), residual)
        return out


def feed_forward_kind(config: HFConfig) -> tuple[str, bool]:
    """The activation, and whether it gates another projection. Raises CheckpointError."""
    kind = config.get("feed_forward_proj", str, "relu")
    gated, dash, activation = kind.rpartition("-")
    if gated not in ("", "gated") or (dash and not gated):
        raise CheckpointError(
            "config.json: 'feed_forward_proj' must be ACTIVATION or gated-ACTIVATION, not "
            f"{kind!r}."
        )
    # The gelu of gated layers has always been the one by tanh.
    return "gelu_new" if kind == "gated-gelu" else activation, bool(gated)


class T5Block(nn.Module):
    """Common part of encoder and decoder blocks."""

    attention_type: ClassVar[AttentionType]

    def __init__(self, bias: RelativeBias, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.self_attn = SelfAttention(
            heads_of(config),
            type=self.attention_type,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "self_attn"),
        )
        self.self_attn_norm = norm_of(config, vllm_config)
        self.mlp = T5MLP(vllm_config=vllm_config, prefix=join(prefix, "mlp"))
        self.mlp_norm = norm_of(config, vllm_config)

    def attend(self, x: Tensor) -> Tensor:
        """The part that sees the sequence itself: x [T, H] -> [T, H]."""
        out: Tensor = self.self_attn(self.self_attn_norm(x), x)
        return out

    def feed_forward(self, x: Tensor) -> Tensor:
        """The last part: x [T, H] -> [T, H]."""
        out: Tensor = self.mlp(self.mlp_norm(x), x)
        return out


class T5EncoderBlock(T5Block):
    """One layer: x [E, H] -> [E, H]."""

    attention_type = AttentionType.ENCODER

    def forward(self, x: Tensor) -> Tensor:
        return self.feed_forward(self.attend(x))


class T5DecoderBlock(T5Block):
    """One layer: x [T, H], and encoder states as CrossAttention takes them -> [T, H]."""

    attention_type = AttentionType.DECODER

    def __init__(self, bias: RelativeBias, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(bias, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.cross_attn = CrossAttention(
            heads_of(config), vllm_config=vllm_config, prefix=join(prefix, "cross_attn")
        )
        self.cross_attn_norm = norm_of(config, vllm_config)

    def forward(self, x: Tensor, encoder_hidden_states: Tensor | None) -> Tensor:
        x = self.attend(x)
        x = self.cross_attn(self.cross_attn_norm(x), x, encoder_hidden_states)
        return self.feed_forward(x)


class T5Stack(nn.Module):
    """The encoder, or the decoder: tokens [T], and what its layers take besides -> hidden states
    [T, H]."""

    def __init__(
        self,
        block: type[T5Block],
        num_layers: int,
        embed_tokens: VocabParallelEmbedding,
        *,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        is_causal = block.attention_type is AttentionType.DECODER
        self.relative_attention_bias = RelativeBias(is_causal=is_causal, vllm_config=vllm_config)
        self.block = nn.ModuleList(
            block(
                self.relative_attention_bias,
                vllm_config=vllm_config,
                prefix=join(prefix, f"block.{i}"),
            )
            for i in range(num_layers)
        )
        self.final_layer_norm = norm_of(HFConfig(vllm_config.hf_config), vllm_config)

    def forward(self, input_ids: Tensor, *inputs: Tensor | None) -> Tensor:
        x = self.embed_tokens(input_ids)
        for block in self.block:
            x = block(x, *inputs)
        out: Tensor = self.final_layer_norm(x)
        return out


class T5ForConditionalGeneration(Model):
    """T5 with its language-modeling head. The first release shares the head with the embedding, and
    scales what it takes."""

    parts = {"encoder": EncoderPart}
    packed = {**PACKED, "wi_0_1": ("wi_0", "wi_1")}
    renames = (
        (
            r"\.block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.",
            ".relative_attention_bias.",
        ),
        (r"\.layer\.0\.SelfAttention\.", ".self_attn."),
        (r"\.layer\.0\.layer_norm\.", ".self_attn_norm."),
        (r"\.layer\.1\.EncDecAttention\.", ".cross_attn."),
        (r"^(decoder\..*)\.layer\.1\.layer_norm\.", r"\1.cross_attn_norm."),
        (r"\.layer\.[12]\.DenseReluDense\.", ".mlp."),
        (r"\.layer\.[12]\.layer_norm\.", ".mlp_norm."),
        (r"\.([qkv])\.weight$", r".\1_proj.weight"),
        (r"\.o\.weight$", ".out_proj.weight"),
    )
    embedder = "toolkit_lm_encdec.t5_encoder:T5EncoderModel"
    # A table that T5's first files have, and nothing reads.
    ignored = (r"\.cross_attn\.relative_attention_bias\.",)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        sizes = config.require("vocab_size", int), config.require("d_model", int)
        num_layers = config.require("num_layers", int)
        self.output_scale = self.scale_of_outputs(config)
        self.shared = VocabParallelEmbedding(
            *sizes, vllm_config=vllm_config, prefix=join(prefix, "shared")
        )
        self.encoder = T5Stack(
            T5EncoderBlock,
            num_layers,
            self.shared,
            vllm_config=vllm_config,
            prefix=join(prefix, "encoder"),
        )
        see_encoder_tokens(self.encoder)
        num_layers = config.get("num_decoder_layers", int, num_layers)
        self.decoder = T5Stack(
            T5DecoderBlock,
            num_layers,
            self.shared,
            vllm_config=vllm_config,
            prefix=join(prefix, "decoder"),
        )
        tied_to = None if self.output_scale is None else self.shared
        self.lm_head = ParallelLMHead(
            *sizes, tied_to=tied_to, vllm_config=vllm_config, prefix=join(prefix, "lm_head")
        )

    def scale_of_outputs(self, config: HFConfig) -> float | None:
        """Factor on the head's input, if the head is the embedding; None if it has a weight of its
        own."""
        # transformers 5 writes that embeddings are tied whatever they are, and keeps the truth
        # under a name of its own.
        is_tied = config.get(
            "scale_decoder_outputs", bool, config.get("tie_word_embeddings", bool, True)
        )
        return config.require("d_model", int) ** -0.5 if is_tied else None

    def encode(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.encoder(input_ids)
        return out

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        out: Tensor = self.decoder(input_ids, encoder_hidden_states)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(
            hidden_states if self.output_scale is None else hidden_states * self.output_scale
        )
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        # transformers 5 leaves the head out where its weight is that of the embedding.
        return super().load_weights(with_substitutes(weights, {"lm_head.weight": "shared.weight"}))


class MT5ForConditionalGeneration(T5ForConditionalGeneration):
    """mT5 (Xue et al. 2020): a head of its own, whatever config.json says."""

    def scale_of_outputs(self, config: HFConfig) -> float | None:
        return None
