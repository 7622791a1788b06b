"""Zamba2 (Glorioso et al. 2024): Mamba-2, and before some of its layers a transformer block that
layers share, each with adapters of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    IntermediateTensors,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    Rotation,
    RowParallelLinear,
    get_activation,
    join,
    layer_index,
)
from toolkit_lm_decoder.llama import LlamaParts, eps_of, norm_of
from torch import Tensor, nn

from toolkit_lm_hybrid.hybrid import (
    HybridForCausalLM,
    HybridModel,
    HybridParts,
    layer_kind,
    with_values,
)
from toolkit_lm_hybrid.mamba2 import Mamba2Mixer, Mamba2Shape


class Zamba2Mixer(Mamba2Mixer):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        config = HFConfig(vllm_config.hf_config)
        least = config.get("time_step_min", float, 0.001)
        values = {"hidden_act": "silu", "time_step_limit": [least, math.inf]}
        super().__init__(vllm_config=with_values(vllm_config, **values), prefix=prefix)

    def shape(self, config: HFConfig) -> Mamba2Shape:
        return Mamba2Shape(
            inner_size=config.get("mamba_expand", int, 2) * config.require("hidden_size", int),
            heads=config.get("n_mamba_heads", int, 8),
            groups=config.get("mamba_ngroups", int, 1),
            state_size=config.get("mamba_d_state", int, 64),
            kernel_size=config.get("mamba_d_conv", int, 4),
            conv_bias=True,
            bias=config.get("add_bias_linear", bool, False),
            eps=1e-5,
        )


class Zamba2Block(nn.Module):
    """The weights of a transformer block. It takes hidden states beside embeddings, [T, 2 H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        heads = config.require("num_attention_heads", int)
        head_size = config.require("head_dim", int)
        inner_size = config.get("intermediate_size", int, 4 * hidden_size)
        bias = config.get("add_bias_linear", bool, False)
        wide = RMSNorm(2 * hidden_size, eps=eps_of(config), vllm_config=vllm_config)
        self.input_layernorm = wide
        self.pre_ff_layernorm = norm_of(config, vllm_config, RMSNorm)
        self.qkv_proj = QKVParallelLinear(
            2 * hidden_size,
            head_size,
            heads,
            config.get("num_key_value_heads", int, heads),
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.o_proj = RowParallelLinear(
            heads * head_size,
            hidden_size,
            bias=False,
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [inner_size] * 2,
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
        self.sizes = (self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size)


class Zamba2Layer(nn.Module):
    """Mamba-2 after a norm. Before them some layers have a block that others use too."""

    def __init__(self, parts: type[HybridParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.input_layernorm = norm_of(config, vllm_config, parts.norm)
        self.mamba = Zamba2Mixer(vllm_config=vllm_config, prefix=join(prefix, "mamba"))
        self.adapts = config.get("use_shared_attention_adapter", bool, False)
        self.block: int | None = None
        """The number of the block."""
        layer = layer_index(prefix)
        if layer_kind(parts, config, layer) == "hybrid":
            assert issubclass(parts, Zamba2ForCausalLM)
            self.block = parts.sharing_layers(config).index(layer) % parts.num_blocks(config)
            self._add_own_part(config, vllm_config=vllm_config, prefix=prefix)

    def _add_own_part(self, config: HFConfig, *, vllm_config: VllmConfig, prefix: str) -> None:
        """Adds the attention with its cache, the adapters, and the projection after the block."""
        hidden_size = config.require("hidden_size", int)
        heads = config.require("num_attention_heads", int)
        kv_heads = config.get("num_key_value_heads", int, heads)
        rank = config.get("adapter_rank", int, 128)
        options: dict[str, Any] = {"bias": False, "vllm_config": vllm_config}
        self.head_size = config.require("head_dim", int)
        if self.adapts and kv_heads != heads:
            raise CheckpointError(
                f"config.json: with 'use_shared_attention_adapter', 'num_key_value_heads' must be "
                f"{heads}, not {kv_heads}."
            )
        for name in ("q", "k", "v") if self.adapts else ():
            at = f"linear_{name}_adapter"
            down = ReplicatedLinear(
                2 * hidden_size, rank, prefix=join(prefix, f"{at}.0"), **options
            )
            up = ColumnParallelLinear(
                rank, heads * self.head_size, prefix=join(prefix, f"{at}.1"), **options
            )
            self.add_module(at, nn.Sequential(down, up))
        at = join(prefix, "gate_up_proj_adapter")
        inner_size = config.get("intermediate_size", int, 4 * hidden_size)
        self.gate_up_proj_adapter = nn.Sequential(
            ReplicatedLinear(hidden_size, rank, prefix=f"{at}.0", **options),
            MergedColumnParallelLinear(rank, [inner_size] * 2, prefix=f"{at}.1", **options),
        )
        self.activation = get_activation(config.get("hidden_act", str, "gelu"))
        parallel = vllm_config.parallel.tensor_parallel_size
        self.attn = Attention(
            heads // parallel,
            self.head_size,
            num_kv_heads=max(1, kv_heads // parallel),
            scale=(self.head_size / 2) ** -0.5,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )
        self.linear = ReplicatedLinear(
            hidden_size, hidden_size, prefix=join(prefix, "linear"), **options
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        embeds: Tensor,
        block: Zamba2Block | None,
    ) -> tuple[Tensor, Tensor]:
        """`embeds` [T, H] are what the model's first layer gets."""
        if block is None:
            if residual is None:
                x, residual = self.input_layernorm(x), x
            else:
                x, residual = self.input_layernorm(x, residual)
            return self.mamba(x), residual
        hidden = x if residual is None else x + residual
        added = self.transform(torch.cat([hidden, embeds], dim=-1), rotation, block)
        return self.mamba(self.input_layernorm(hidden + added)), hidden

    def transform(self, wide: Tensor, rotation: Rotation, block: Zamba2Block) -> Tensor:
        """The block's result of [T, 2 H], projected: [T, H]."""
        wide = block.input_layernorm(wide)
        made = block.qkv_proj(wide).split(block.sizes, dim=-1)
        if self.adapts:
            names = (f"linear_{name}_adapter" for name in "qkv")
            made = [
                part + self.get_submodule(name)(wide)
                for part, name in zip(made, names, strict=True)
            ]
        q, k = (rotation.rotate(part.view(len(wide), -1, self.head_size)) for part in made[:2])
        x = block.pre_ff_layernorm(block.o_proj(self.attn(q, k, made[2])))
        gate, up = (block.gate_up_proj(x) + self.gate_up_proj_adapter(x)).chunk(2, dim=-1)
        out: Tensor = self.linear(block.down_proj(self.activation(gate) * up))
        return out


class Zamba2Model(HybridModel):
    is_tied_by_default = True

    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        assert issubclass(parts, Zamba2ForCausalLM)
        count = parts.num_blocks(HFConfig(vllm_config.hf_config))
        self.blocks = nn.ModuleList(
            Zamba2Block(vllm_config=vllm_config, prefix=join(prefix, f"blocks.{i}"))
            for i in range(count)
        )

    def rotates(self, config: HFConfig) -> bool:
        return config.get("use_mem_rope", bool, False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        residual: Tensor | None = None
        if intermediate is not None:
            x = intermediate["hidden_states"]
            residual = intermediate["residual"]
            embeds = intermediate["embeds"]
        else:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            embeds = x
        rotation: Rotation = self.rotary(positions)
        for layer in self.layers.owned:
            assert isinstance(layer, Zamba2Layer)
            block = None if layer.block is None else self.blocks[layer.block]
            x, residual = layer(x, residual, rotation, embeds, block)
        if not self.is_last:
            assert residual is not None, "a pipeline rank without layers"
            return {"hidden_states": x, "residual": residual, "embeds": embeds}
        out: Tensor = self.norm(x, residual)[0]
        return out


class Zamba2ForCausalLM(HybridForCausalLM):
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    mixers = {
        "linear_attention": {"mamba": Zamba2Mixer},
        "hybrid": {"mamba": Zamba2Mixer},
    }
    renames: Sequence[tuple[str, str]]  # type: ignore[misc]
    ignored: Sequence[str]  # type: ignore[misc,assignment]
    layer: ClassVar[Any] = Zamba2Layer
    decoder = Zamba2Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = HFConfig(vllm_config.hf_config)
        self.renames, self.ignored = self.names(config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @classmethod
    def num_blocks(cls, config: HFConfig) -> int:
        """Blocks that there are. transformers ties none where it ties no embeddings."""
        if not config.get("tie_word_embeddings", bool, True):
            return len(cls.sharing_layers(config))
        return config.get("num_mem_blocks", int, 1)

    @classmethod
    def sharing_layers(cls, config: HFConfig) -> list[int]:
        return [i for i, kind in enumerate(cls.layer_kinds(config)) if kind == "hybrid"]

    @classmethod
    def names(cls, config: HFConfig) -> tuple[list[tuple[str, str]], list[str]]:
        """Renames, and names that are ignored. Checkpoints have each block under the first layer
        that uses it, with the adapters of all that do; others may have it again."""
        renames = [(r"\.mamba_decoder\.", "."), (r"\.final_layernorm\.", ".norm.")]
        layers = cls.sharing_layers(config)
        count = cls.num_blocks(config)
        for block, first in enumerate(layers[:count]):
            shared = rf"\.layers\.{first}\.shared_transformer\."
            for turn in range(block, len(layers), count):
                own = rf".layers.{layers[turn]}.\1_adapter."
                renames.append((rf"{shared}\w+\.(\w+)_adapter_list\.{turn}\.", own))
            renames.append((rf"{shared}(?:self_attn\.|feed_forward\.)?", f".blocks.{block}."))
        again = [rf"\.layers\.{i}\.shared_transformer\." for i in layers[count:]]
        # Untied blocks have adapters that no layer uses.
        return renames, again or [r"_adapter_list\."]

    @classmethod
    def values(cls, config: HFConfig) -> dict[str, Any]:
        size = 2 * config.require("hidden_size", int)
        size //= config.require("num_attention_heads", int)
        return {
            "head_dim": config.get("attention_head_dim", int, size),
            "rms_norm_eps": config.get("rms_norm_eps", float, 1e-5),
        }

    @classmethod
    def layer_kinds(cls, config: HFConfig) -> list[str]:
        kinds = config.get("layers_block_type", list, config.get("layer_types", list, []))
        return ["linear_attention" if kind == "mamba" else str(kind) for kind in kinds]
