"""OPT: learned positions, and layer norms before or after each half of a layer."""

from __future__ import annotations

from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    Absent,
    ColumnParallelLinear,
    HFConfig,
    IntermediateTensors,
    LayerNorm,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    join,
    make_layers,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_decoder.causal_lm import CausalLM, Decoder

POSITION_OFFSET = 2
"""Rows of the table of positions that stand before position 0."""


def layer_norm(config: HFConfig, vllm_config: VllmConfig) -> LayerNorm:
    affine = config.get("layer_norm_elementwise_affine", bool, True)
    return LayerNorm(
        config.require("hidden_size", int),
        elementwise_affine=affine,
        dtype=torch_dtype(vllm_config.model.dtype),
    )


class OPTAttention(nn.Module):
    """Multi-head self-attention: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        heads = config.require("num_attention_heads", int)
        bias = config.get("enable_bias", bool, True)
        self.qkv_proj = QKVParallelLinear(
            size,
            size // heads,
            heads,
            heads,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.out_proj = RowParallelLinear(
            size, size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "out_proj")
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            size // heads,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out_proj(self.attn(*self.qkv_proj(x).chunk(3, dim=-1)))
        return out


class OPTDecoderLayer(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        inner = config.require("ffn_dim", int)
        bias = config.get("enable_bias", bool, True)
        self.norms_first = config.get("do_layer_norm_before", bool, True)
        self.self_attn = OPTAttention(vllm_config=vllm_config, prefix=join(prefix, "self_attn"))
        self.self_attn_layer_norm = layer_norm(config, vllm_config)
        activation = config.get("activation_function", str, "relu")
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
        self.final_layer_norm = layer_norm(config, vllm_config)

    def forward(self, x: Tensor) -> Tensor:
        if self.norms_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x))
            return x + self._feed_forward(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        out: Tensor = self.final_layer_norm(x + self._feed_forward(x))
        return out

    def _feed_forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.fc1(x))
        return out


class OPTModel(Decoder):
    """The embeddings, the layers and the last norm."""

    is_tied_by_default = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        outer = self.embedding_size(config)
        rows = config.require("max_position_embeddings", int) + POSITION_OFFSET
        dtype = torch_dtype(vllm_config.model.dtype)
        self.embed_positions = nn.Embedding(rows, size, dtype=dtype) if self.is_first else Absent()
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda prefix: OPTDecoderLayer(vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layers"),
            vllm_config.parallel,
        )
        self.final_layer_norm = self._last_norm(config) if self.is_last else Absent()
        self.project_in: nn.Module = nn.Identity()
        self.project_out: nn.Module = nn.Identity()
        if outer != size:
            self.project_in = (
                self._projection(outer, size, "project_in") if self.is_first else Absent()
            )
            self.project_out = (
                self._projection(size, outer, "project_out") if self.is_last else Absent()
            )

    def _last_norm(self, config: HFConfig) -> nn.Module:
        # Checkpoints that were trained by early releases of transformers lack it, and say so.
        lacks = config.get("_remove_final_layer_norm", bool, False) or not config.get(
            "do_layer_norm_before", bool, True
        )
        return nn.Identity() if lacks else layer_norm(config, self.vllm_config)

    def _projection(self, input_size: int, output_size: int, name: str) -> ReplicatedLinear:
        return ReplicatedLinear(
            input_size, output_size, vllm_config=self.vllm_config, prefix=join(self.prefix, name)
        )

    def embedding_size(self, config: HFConfig) -> int:
        return config.get("word_embed_proj_dim", int) or config.require("hidden_size", int)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        if intermediate is not None:
            x = intermediate["hidden_states"]
        else:
            embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            x = self.project_in(embeds) + self.embed_positions(positions + POSITION_OFFSET)
        for layer in self.layers.owned:
            x = layer(x)
        return self.project_out(self.final_layer_norm(x)) if self.is_last else {"hidden_states": x}


class OPTForCausalLM(CausalLM):
    """OPT with its language-modeling head."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    renames = ((r"^(model\.)?decoder\.", "model."),)

    def make_decoder(self, prefix: str) -> OPTModel:
        return OPTModel(vllm_config=self.vllm_config, prefix=prefix)
