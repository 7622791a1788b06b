"""Llama, and the parts that decoder families of its kind share."""

from __future__ import annotations

from typing import ClassVar

from llm_toolkit.attention import Attention
from llm_toolkit.config import VllmConfig
from llm_toolkit.model import (
    Absent,
    GatedActivation,
    HFConfig,
    IntermediateTensors,
    MergedColumnParallelLinear,
    Model,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RopeParameters,
    RotaryEmbedding,
    Rotation,
    RowParallelLinear,
    VocabParallelEmbedding,
    is_first_stage,
    is_last_stage,
    join,
    make_layers,
)
from torch import Tensor, nn


def head_size_of(config: HFConfig) -> int:
    """`head_dim`, or hidden_size over heads where it is not stated."""
    return config.get("head_dim", int) or config.require("hidden_size", int) // config.require("num_attention_heads", int)


def norm_of(config: HFConfig, vllm_config: VllmConfig) -> RMSNorm:
    """A norm of the hidden states."""
    return RMSNorm(config.require("hidden_size", int), eps=config.get("rms_norm_eps", float, 1e-6), vllm_config=vllm_config)


class LlamaAttention(nn.Module):
    """Grouped-query self-attention: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size, num_heads = config.require("hidden_size", int), config.require("num_attention_heads", int)
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
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def has_qkv_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", bool, False)

    def has_output_bias(self, config: HFConfig) -> bool:
        return config.get("attention_bias", bool, False)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        qkv = self.qkv_proj(x)
        # Queries and keys lie side by side, so one rotation serves both.
        rotation.rotate(qkv[:, : self.rotated_size].view(len(qkv), -1, self.head_size))
        out: Tensor = self.o_proj(self.attn(*qkv.split(self.sizes, dim=-1)))
        return out


class LlamaMLP(nn.Module):
    """Gated feed-forward: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size, inner_size = config.require("hidden_size", int), config.require("intermediate_size", int)
        bias = config.get("mlp_bias", bool, False)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, [inner_size, inner_size], bias=bias, vllm_config=vllm_config, prefix=join(prefix, "gate_up_proj")
        )
        self.act_fn = GatedActivation(config.get("hidden_act", str, "silu"))
        self.down_proj = RowParallelLinear(inner_size, hidden_size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "down_proj"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out


class LlamaDecoderLayer(nn.Module):
    """One layer. The residual travels beside the hidden states, so that each addition joins the norm after it."""

    attention: ClassVar[type[nn.Module]] = LlamaAttention
    feed_forward: ClassVar[type[nn.Module]] = LlamaMLP

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.input_layernorm = norm_of(config, vllm_config)
        self.self_attn = self.attention(vllm_config=vllm_config, prefix=join(prefix, "self_attn"))
        self.post_attention_layernorm = norm_of(config, vllm_config)
        self.mlp = self.feed_forward(vllm_config=vllm_config, prefix=join(prefix, "mlp"))

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual, x = x, self.input_layernorm(x)
        else:
            x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, rotation)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual


class LlamaModel(Model):
    """The embedding, the layers and the last norm."""

    layer: ClassVar[type[nn.Module]] = LlamaDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config, parallel = HFConfig(vllm_config.hf_config), vllm_config.parallel
        self.is_last = is_last_stage(parallel)
        embeds = is_first_stage(parallel) or (self.is_last and config.get("tie_word_embeddings", bool, False))
        self.embed_tokens = self._embedding(config) if embeds else Absent()
        self.rotary = self._rotary(config)
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda prefix: self.layer(vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layers"),
            parallel,
        )
        self.norm = norm_of(config, vllm_config) if self.is_last else Absent()

    def _embedding(self, config: HFConfig) -> VocabParallelEmbedding:
        sizes = config.require("vocab_size", int), config.require("hidden_size", int)
        return VocabParallelEmbedding(*sizes, vllm_config=self.vllm_config, prefix=join(self.prefix, "embed_tokens"))

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return RotaryEmbedding(RopeParameters.read(config, head_size_of(config)), vllm_config=self.vllm_config)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        residual: Tensor | None
        if intermediate is not None:
            x, residual = intermediate["hidden_states"], intermediate["residual"]
        else:
            x, residual = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds, None
        rotation = self.rotary(positions)
        for layer in self.layers.owned:
            x, residual = layer(x, residual, rotation)
        if not self.is_last:
            assert residual is not None, "a pipeline rank without layers"
            return {"hidden_states": x, "residual": residual}
        out: Tensor = self.norm(x, residual)[0]
        return out


class LlamaForCausalLM(Model):
    """Llama with its language-modeling head."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    ignored = (r"rotary_emb\.inv_freq$",)
    decoder: ClassVar[type[Model]] = LlamaModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.model = self.decoder(vllm_config=vllm_config, prefix=join(prefix, "model"))
        self.lm_head = self._head(config) if is_last_stage(vllm_config.parallel) else Absent()

    def _head(self, config: HFConfig) -> ParallelLMHead:
        tied = self.model.get_submodule("embed_tokens") if config.get("tie_word_embeddings", bool, False) else None
        assert tied is None or isinstance(tied, VocabParallelEmbedding)
        sizes = config.require("vocab_size", int), config.require("hidden_size", int)
        return ParallelLMHead(*sizes, tied_to=tied, vllm_config=self.vllm_config, prefix=join(self.prefix, "lm_head"))

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        out: Tensor | IntermediateTensors = self.model(input_ids, positions, inputs_embeds=inputs_embeds, intermediate=intermediate)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits
