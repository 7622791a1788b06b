"""Parts of Gemma 3n and Gemma 4: embeddings for each layer, and layers that read the keys and
values of an earlier one."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from toolkit_lm.attention import Attention
from toolkit_lm.bypass import Bypassable
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import (
    Absent,
    Epilogue,
    HFConfig,
    IntermediateTensors,
    LinearBase,
    LinearSpec,
    ReplicatedLinear,
    RMSNorm,
    Rotation,
    RowParallelLinear,
    Rows,
    Shard,
    ShardLoader,
    VocabParallelEmbedding,
    choose_kernels,
    get_activation,
    join,
    layer_index,
    new_parameter,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_decoder.gemma2 import CappedForCausalLM, Gemma2DecoderLayer
from toolkit_lm_decoder.gemma3 import Gemma3Model
from toolkit_lm_decoder.llama import (
    LlamaModel,
    LlamaParts,
    eps_of,
    head_size_of,
    layer_window,
    norm_of,
)

SharedKV = dict[str, tuple[Tensor, Tensor]]
"""The keys and values of a step, by kind of layer, [T, KV heads, head_size] each."""
_OF_KEYS = re.compile(r"\blayers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")

_OF_EMBEDDINGS = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)


class Float32RMSNorm(RMSNorm):
    """RMSNorm whose weight is float32."""

    def __init__(self, size: int, *, eps: float, vllm_config: VllmConfig) -> None:
        super().__init__(size, eps=eps, vllm_config=vllm_config)
        loader = ShardLoader((Shard.whole(size),))
        self.weight = new_parameter((size,), torch.float32, loader)


class UnitRMSNorm(RMSNorm):
    """RMSNorm without a weight: x / rms(x) over the last axis, of length `size`."""

    weight: Tensor  # type: ignore[assignment]

    def __init__(self, size: int, *, eps: float) -> None:
        # The norm's own would make a parameter, which checkpoints do not have.
        nn.Module.__init__(self)
        self.eps = eps
        self.kernels = choose_kernels()
        self.register_buffer("weight", torch.ones(size, dtype=torch.float32), persistent=False)


def window_of(config: HFConfig, layer: int, pattern: int) -> int | None:
    """The window of a layer. Without `layer_types`, every `pattern`-th has none."""
    return layer_window(config, layer, otherwise=(layer + 1) % pattern != 0)


def first_reader(config: HFConfig) -> int:
    """The first layer that reads the keys and values of another: the last `num_kv_shared_layers`
    do."""
    layers = config.require("num_hidden_layers", int)
    readers = config.get("num_kv_shared_layers", int, 0)
    if not 0 <= readers < layers:
        raise CheckpointError(
            f"config.json: 'num_kv_shared_layers' must be 0 to {layers - 1}, not {readers}."
        )
    return layers - readers


class SharedKVAttention(Bypassable):
    """Grouped-query self-attention with normed queries, keys and values: x [T, H] -> [T, H]. The
    last layers read the cache of the last layer of their kind before them."""

    seams = frozenset({"pattern", "window", "head_size_of", "num_kv_heads_of", "has_values"})
    pattern: ClassVar[int] = 5
    """Without `layer_types`, one of so many layers has no window."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        parallel = vllm_config.parallel
        layer = layer_index(prefix)
        window = self.window(config, layer)
        self.kind = self._kind(config, layer)
        self.head_size = self.head_size_of(config, self.kind)
        owner = self._owner(config, layer)
        self.reads = owner is not None
        num_heads = config.require("num_attention_heads", int)
        heads = Shard.even(num_heads, parallel, f"attention heads of {prefix}")
        kv_heads = self.num_kv_heads_of(config, self.kind)
        ranks = parallel.tensor_parallel_size
        if kv_heads < ranks and ranks % kv_heads == 0:
            kv = Shard(kv_heads, parallel.tensor_parallel_rank // (ranks // kv_heads), 1)
        else:
            kv = Shard.even(kv_heads, parallel, f"KV heads of {prefix}")
        self.name = "q_proj"
        if not self.reads:
            self.name = "qkv_proj" if self.has_values(config, self.kind) else "qk_proj"
        shards = {"q_proj": [heads], "qk_proj": [heads, kv], "qkv_proj": [heads, kv, kv]}[self.name]
        size = self.head_size
        outputs = tuple(Shard(s.full * size, s.start * size, s.size * size) for s in shards)
        hidden_size = config.require("hidden_size", int)
        bias = config.get("attention_bias", bool, False)
        spec = LinearSpec(
            kind="linear",
            prefix=join(prefix, self.name),
            inputs=Shard.whole(hidden_size),
            outputs=outputs,
            dtype=torch_dtype(vllm_config.model.dtype),
        )
        self.add_module(self.name, LinearBase(spec, bias=bias))
        self.sizes = [shard.size for shard in outputs]
        self.o_proj = RowParallelLinear(
            num_heads * size,
            hidden_size,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        eps = eps_of(config)
        self.q_norm = Float32RMSNorm(size, eps=eps, vllm_config=vllm_config)
        if not self.reads:
            self.k_norm = Float32RMSNorm(size, eps=eps, vllm_config=vllm_config)
            self.v_norm = UnitRMSNorm(size, eps=eps)
        own = join(prefix, "attn")
        self.attn = Attention(
            heads.size,
            size,
            num_kv_heads=kv.size,
            scale=1.0,
            window=window,
            shares_with=None if owner is None else own.replace(f".{layer}.", f".{owner}.", 1),
            vllm_config=vllm_config,
            prefix=own,
        )

    def window(self, config: HFConfig, layer: int) -> int | None:
        return window_of(config, layer, self.pattern)

    def head_size_of(self, config: HFConfig, kind: str) -> int:
        return head_size_of(config)

    def num_kv_heads_of(self, config: HFConfig, kind: str) -> int:
        return config.require("num_key_value_heads", int)

    def has_values(self, config: HFConfig, kind: str) -> bool:
        """Whether values have a projection of their own. If not, they are the keys before norm and
        rotation."""
        return True

    def _kind(self, config: HFConfig, layer: int) -> str:
        is_full = self.window(config, layer) is None
        return "full_attention" if is_full else "sliding_attention"

    def _owner(self, config: HFConfig, layer: int) -> int | None:
        first = first_reader(config)
        if layer < first:
            return None
        for owner in reversed(range(first)):
            if self._kind(config, owner) == self.kind:
                return owner
        raise CheckpointError(
            f"config.json: layer {layer} reads the keys of an earlier layer of type {self.kind}, "
            f"and of the first {first} ('num_hidden_layers' less 'num_kv_shared_layers') none is."
        )

    def forward(self, x: Tensor, rotation: Rotation, shared: SharedKV) -> Tensor:
        """Adds its keys and values to `shared`, or reads those of its kind. Where these are not
        there, a kernel has computed their layer, and the cache has them."""
        projected: Tensor = self.get_submodule(self.name)(x)
        parts = torch.split(projected, self.sizes, dim=-1)
        heads = [part.view(len(x), -1, self.head_size) for part in parts]
        q = rotation.rotate(self.q_norm(heads[0]))
        if not self.reads:
            v = self.v_norm(heads[-1])
            shared[self.kind] = rotation.rotate(self.k_norm(heads[1])), v
        out: Tensor = self.o_proj(self.attn(q, *shared.get(self.kind, (None, None))))
        return out


class ActivatedLinear(ReplicatedLinear):
    """A linear layer with an activation: x [T, inputs] -> activation(x W^T) [T, outputs]."""

    seams = frozenset()

    def __init__(
        self, inputs: int, outputs: int, *, activation: str, vllm_config: VllmConfig, prefix: str
    ) -> None:
        """`activation` is a name that `get_activation` knows."""
        super().__init__(inputs, outputs, vllm_config=vllm_config, prefix=prefix)
        get_activation(activation)
        self.epilogue = Epilogue(activation)

    def forward(self, x: Tensor, rows: Rows | Tensor | None = None) -> Tensor:
        return self.method.apply(
            x, self.bias, self.epilogue, rows=self.rows if rows is None else rows
        )


class PerLayerDecoderLayer(nn.Module):
    """Base of a layer with norms on both sides of attention and feed-forward, and a gate for an
    embedding of its own."""

    norms = Gemma2DecoderLayer.norms
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        self.index = layer_index(prefix)
        for name in self.norms:
            self.add_module(name, norm_of(config, vllm_config, parts.norm))
        self.self_attn = parts.attention(vllm_config=vllm_config, prefix=join(prefix, "self_attn"))
        self.mlp = parts.feed_forward(vllm_config=vllm_config, prefix=join(prefix, "mlp"))
        if size := per_layer_size(config):
            hidden_size = config.require("hidden_size", int)
            self.per_layer_input_gate = ActivatedLinear(
                hidden_size,
                size,
                activation=activation_of(config),
                vllm_config=vllm_config,
                prefix=join(prefix, "per_layer_input_gate"),
            )
            self.per_layer_projection = ReplicatedLinear(
                size,
                hidden_size,
                vllm_config=vllm_config,
                prefix=join(prefix, "per_layer_projection"),
            )
            self.post_per_layer_input_norm = norm_of(config, vllm_config, parts.norm)

    def gated(self, x: Tensor, embedding: Tensor) -> Tensor:
        """The summand of x [T, H] that the layer's embedding [T, P] makes."""
        gated = self.per_layer_input_gate(x) * embedding
        out: Tensor = self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return out


def per_layer_size(config: HFConfig) -> int:
    """Length of a layer's embedding of a token; 0: there is none."""
    return config.get("hidden_size_per_layer_input", int, 256)


def activation_of(config: HFConfig) -> str:
    return config.get("hidden_activation", str, "gelu_pytorch_tanh")


class PerLayerModel(Gemma3Model):
    """A decoder whose layers get an embedding of the token each: `layer(x, None, rotation,
    embedding [T, P] or None, shared)` gives (x, None)."""

    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        if config.get("use_bidirectional_attention", object) in (True, "all"):
            raise UnsupportedError(
                "config.json: 'use_bidirectional_attention' makes this model an encoder. Only "
                "decoders can be run."
            )
        self.num_layers = config.require("num_hidden_layers", int)
        self.size = per_layer_size(config)
        if self.size == 0:
            return
        if not self.is_first:
            for name in _OF_EMBEDDINGS:
                self.add_module(name, Absent())
            return
        hidden_size = config.require("hidden_size", int)
        size = self.num_layers * self.size
        self.table_size = config.get("vocab_size_per_layer_input", int, 262_144)
        dtype = torch_dtype(vllm_config.model.dtype)
        self.embed_tokens_per_layer = VocabParallelEmbedding(
            self.table_size,
            size,
            # The factor is rounded to the model's dtype, as that of its other embedding.
            scale=float(torch.tensor(self.size**0.5, dtype=dtype, device="cpu")),
            vllm_config=vllm_config,
            prefix=join(prefix, "embed_tokens_per_layer"),
        )
        self.per_layer_model_projection = ReplicatedLinear(
            hidden_size,
            size,
            vllm_config=vllm_config,
            prefix=join(prefix, "per_layer_model_projection"),
        )
        self.projection_scale = hidden_size**-0.5
        self.per_layer_projection_norm = Float32RMSNorm(
            self.size, eps=eps_of(config), vllm_config=vllm_config
        )

    def per_layer_inputs(self, input_ids: Tensor, embeds: Tensor) -> Tensor:
        """The layers' embeddings [T, layers * P]: of the tokens, and projected from `embeds`."""
        beyond = input_ids >= self.table_size
        of_tokens = self.embed_tokens_per_layer(input_ids.masked_fill(beyond, 0))
        projected = self.per_layer_model_projection(embeds) * self.projection_scale
        shape = len(embeds), self.num_layers, self.size
        normed: Tensor = self.per_layer_projection_norm(projected.view(shape))
        summed: Tensor = normed.view(of_tokens.shape) + of_tokens
        return summed * math.sqrt(0.5)

    def spread(self, embeds: Tensor) -> Tensor:
        """The first layer's input, made of the embeddings [T, H]."""
        return embeds

    def merge(self, x: Tensor) -> Tensor:
        """The hidden states [T, H] that the last layer's output stands for."""
        return x

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        """`inputs_embeds` [T, H]: in place of the tokens' embeddings, but not of the layers'."""
        embeddings: Tensor | None = None
        if intermediate is not None:
            x = intermediate["hidden_states"]
            embeddings = intermediate.get("per_layer_inputs")
        else:
            embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            embeddings = self.per_layer_inputs(input_ids, embeds) if self.size else None
            x = self.spread(embeds)
        split: Sequence[Tensor | None] = [None] * self.num_layers
        if embeddings is not None:
            split = torch.split(embeddings, self.size, dim=-1)
        shared: SharedKV = {}
        owned: tuple[Any, ...] = self.layers.owned
        for layer, rotation in zip(owned, self.rotations(positions), strict=True):
            x, _ = layer(x, None, rotation, split[layer.index], shared)
        if not self.is_last:
            own = {} if embeddings is None else {"per_layer_inputs": embeddings}
            return {"hidden_states": x, **own}
        out: Tensor = self.norm(self.merge(x))
        return out


class PerLayerForCausalLM(CappedForCausalLM):
    packed = {**CappedForCausalLM.packed, "qk_proj": ("q_proj", "k_proj")}
    attention: ClassVar[type[nn.Module]] = SharedKVAttention
    norm = Float32RMSNorm
    decoder: ClassVar[type[LlamaModel]] = PerLayerModel

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        # No `inputs_embeds`: the layers' own embeddings are of tokens.
        model = self.get_submodule("model")
        out: Tensor | IntermediateTensors = model(input_ids, positions, intermediate=intermediate)
        return out

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.get_submodule("model.embed_tokens")(input_ids)
        return embedded

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._read(weights))

    def _read(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """All but projections to keys and values in layers that have none; checkpoints may hold
        them."""
        first = first_reader(HFConfig(self.vllm_config.hf_config))
        for name, tensor in weights:
            of_keys = _OF_KEYS.search(name)
            if of_keys is None or int(of_keys[1]) < first:
                yield name, tensor
