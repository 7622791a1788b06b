"""GPT-2: learned positions, layer norms, and weights that are stored transposed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    Absent,
    ColumnParallelLinear,
    HFConfig,
    IntermediateTensors,
    LayerNorm,
    QKVParallelLinear,
    RowParallelLinear,
    join,
    layer_index,
    make_layers,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_decoder.causal_lm import CausalLM, Decoder


def layer_norm(config: HFConfig, vllm_config: VllmConfig) -> LayerNorm:
    eps = config.get("layer_norm_epsilon", float, 1e-5)
    return LayerNorm(
        config.require("n_embd", int), eps=eps, dtype=torch_dtype(vllm_config.model.dtype)
    )


class GPT2Attention(nn.Module):
    """Multi-head self-attention: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("n_embd", int)
        heads = config.require("n_head", int)
        self.c_attn = QKVParallelLinear(
            size,
            size // heads,
            heads,
            heads,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "c_attn"),
        )
        self.c_proj = RowParallelLinear(
            size, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "c_proj")
        )
        scale = (size // heads) ** -0.5 if config.get("scale_attn_weights", bool, True) else 1.0
        if config.get("scale_attn_by_inverse_layer_idx", bool, False):
            scale /= layer_index(prefix) + 1
        self.attn = Attention(
            self.c_attn.num_heads,
            size // heads,
            scale=scale,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.attn(*self.c_attn(x).chunk(3, dim=-1)))
        return out


class GPT2MLP(nn.Module):
    """Feed-forward: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        size = config.require("n_embd", int)
        inner = config.get("n_inner", int, 4 * size)
        activation = config.get("activation_function", str, "gelu_new")
        self.c_fc = ColumnParallelLinear(
            size,
            inner,
            bias=True,
            activation=activation,
            vllm_config=vllm_config,
            prefix=join(prefix, "c_fc"),
        )
        self.c_proj = RowParallelLinear(
            inner, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "c_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.c_fc(x))
        return out


class GPT2Block(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.ln_1 = layer_norm(config, vllm_config)
        self.attn = GPT2Attention(vllm_config=vllm_config, prefix=join(prefix, "attn"))
        self.ln_2 = layer_norm(config, vllm_config)
        self.mlp = GPT2MLP(vllm_config=vllm_config, prefix=join(prefix, "mlp"))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class GPT2Model(Decoder):
    """The embeddings, the layers and the last norm."""

    is_tied_by_default = True
    embedding_name = "wte"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        if config.get("add_cross_attention", bool, False):
            raise UnsupportedError(
                "config.json: 'add_cross_attention' makes a decoder that needs an encoder, and "
                "this model has none."
            )
        sizes = (config.require("n_positions", int), config.require("n_embd", int))
        dtype = torch_dtype(vllm_config.model.dtype)
        self.wpe = nn.Embedding(*sizes, dtype=dtype) if self.is_first else Absent()
        self.h = make_layers(
            config.require("n_layer", int),
            lambda prefix: GPT2Block(vllm_config=vllm_config, prefix=prefix),
            join(prefix, "h"),
            vllm_config.parallel,
        )
        self.ln_f = layer_norm(config, vllm_config) if self.is_last else Absent()

    def embedding_size(self, config: HFConfig) -> int:
        return config.require("n_embd", int)

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
            x = embeds + self.wpe(positions)
        for layer in self.h.owned:
            x = layer(x)
        return self.ln_f(x) if self.is_last else {"hidden_states": x}


class GPT2LMHeadModel(CausalLM):
    """GPT-2 with its language-modeling head."""

    renames = ((r"^(?!transformer\.|lm_head\.)", "transformer."),)
    ignored = (r"\.attn\.(masked_)?bias$",)
    decoder_name = "transformer"

    def make_decoder(self, prefix: str) -> GPT2Model:
        return GPT2Model(vllm_config=self.vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        stored_transposed = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
        return super().load_weights(
            (name, tensor.t() if stored_transposed.search(name) else tensor)
            for name, tensor in weights
        )
