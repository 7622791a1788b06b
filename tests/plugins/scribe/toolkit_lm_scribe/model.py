"""ScribeModel: pre-norm layers, grouped queries, and decoders of which every second looks back no
further than a window."""

from __future__ import annotations

from toolkit_lm.attention import Attention, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    MergedColumnParallelLinear,
    Model,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    see_encoder_tokens,
)
from toolkit_lm.parts import EncoderPart
from torch import Tensor, nn

HEAD_SIZE = 16


class SelfAttention(nn.Module):
    """x [T, H] -> [T, H]."""

    def __init__(
        self, kind: AttentionType, window: int | None, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size, heads, kv_heads = (
            config.require(key, int) for key in ("hidden_size", "num_heads", "num_kv_heads")
        )
        self.qkv = QKVParallelLinear(
            size,
            HEAD_SIZE,
            heads,
            kv_heads,
            bias=False,
            vllm_config=vllm_config,
            prefix=f"{prefix}.qkv",
        )
        self.out = RowParallelLinear(
            heads * HEAD_SIZE, size, bias=False, vllm_config=vllm_config, prefix=f"{prefix}.out"
        )
        self.attn = Attention(
            self.qkv.num_heads,
            HEAD_SIZE,
            num_kv_heads=self.qkv.num_kv_heads,
            type=kind,
            window=window,
            vllm_config=vllm_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.qkv.q_size, self.qkv.kv_size, self.qkv.kv_size]
        out: Tensor = self.out(self.attn(*self.qkv(x).split(sizes, dim=-1)))
        return out


class CrossAttention(nn.Module):
    """x [T, H], encoder states [E, H] or None -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        inner = config.require("num_heads", int) * HEAD_SIZE
        self.q = ColumnParallelLinear(
            size, inner, bias=False, vllm_config=vllm_config, prefix=f"{prefix}.q"
        )
        self.kv = MergedColumnParallelLinear(
            size, [inner, inner], bias=False, vllm_config=vllm_config, prefix=f"{prefix}.kv"
        )
        see_encoder_tokens(self.kv)
        self.out = RowParallelLinear(
            inner, size, bias=False, vllm_config=vllm_config, prefix=f"{prefix}.out"
        )
        heads = self.q.output_size // HEAD_SIZE
        self.attn = Attention(
            heads,
            HEAD_SIZE,
            type=AttentionType.CROSS,
            vllm_config=vllm_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, x: Tensor, states: Tensor | None) -> Tensor:
        kv = () if states is None else self.kv(states).chunk(2, dim=-1)
        out: Tensor = self.out(self.attn(self.q(x), *kv))
        return out


class Layer(nn.Module):
    """One layer of the encoder, or of the decoder."""

    def __init__(self, index: int, *, decodes: bool, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        made = {"vllm_config": vllm_config}
        kind = AttentionType.DECODER if decodes else AttentionType.ENCODER
        window = config.require("window", int) if decodes and index % 2 else None
        self.self_attn = SelfAttention(kind, window, prefix=f"{prefix}.self_attn", **made)
        self.cross_attn = CrossAttention(prefix=f"{prefix}.cross_attn", **made) if decodes else None
        self.up = ColumnParallelLinear(
            size, 2 * size, bias=False, activation="gelu", prefix=f"{prefix}.up", **made
        )
        self.down = RowParallelLinear(2 * size, size, bias=False, prefix=f"{prefix}.down", **made)
        self.norms = nn.ModuleList(
            RMSNorm(size, eps=1e-6, **made) for _ in range(3 if decodes else 2)
        )

    def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.norms[0](x))
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.norms[2](x), states)
        out: Tensor = x + self.down(self.up(self.norms[1](x)))
        return out


class ScribeModel(Model):
    parts = {"encoder": EncoderPart}
    packed = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        made = {"vllm_config": vllm_config}
        vocab_size, size, count = (
            config.require(key, int) for key in ("vocab_size", "hidden_size", "num_layers")
        )
        self.embed = VocabParallelEmbedding(vocab_size, size, prefix="embed", **made)
        self.positions = nn.Embedding(config.require("max_position_embeddings", int), size)
        self.encoder = nn.ModuleList(
            Layer(i, decodes=False, prefix=f"encoder.{i}", **made) for i in range(count)
        )
        see_encoder_tokens(self.encoder)
        self.decoder = nn.ModuleList(
            Layer(i, decodes=True, prefix=f"decoder.{i}", **made) for i in range(count)
        )
        self.lm_head = ParallelLMHead(vocab_size, size, prefix="lm_head", **made)

    def encode(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        x: Tensor = self.embed(input_ids) + self.positions(positions)
        for layer in self.encoder:
            x = layer(x)
        return x

    def forward(
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:  # type: ignore[override]
        x: Tensor = self.embed(input_ids) + self.positions(positions)
        for layer in self.decoder:
            x = layer(x, encoder_hidden_states)
        return x

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits
