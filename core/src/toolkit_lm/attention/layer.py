"""Layers that keep data of each sequence. They declare what they need; the runner binds a backend
and a cache to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from toolkit_lm.attention.backend import (
    AttentionBias,
    AttentionCall,
    CacheBackend,
    LayerParams,
    OffsetBias,
)
from toolkit_lm.attention.context import current, op_layer
from toolkit_lm.attention.selector import Selection, select_backend
from toolkit_lm.attention.spec import AttentionSpec, AttentionType
from toolkit_lm.bypass import Bypassable
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.kv import CrossSpec, FullSpec, KVCacheSpec, WindowSpec
from toolkit_lm.plugin import AttentionBackendRegistry


class CacheLayer(Bypassable):
    """Base of layers that keep something of each sequence in the KV cache: attention, a recurrence.

    `prefix` is the layer's name in the checkpoint, and its key in the engine. In its forward pass,
    `current(prefix)` gives the layer its binding and the metadata that its backend built for the
    step.
    """

    backend: type[CacheBackend]
    """Backend class of the layer, unless `select` chooses among several."""
    params: Any = None
    """Parameters of the layer for its backend."""
    needs_cache: ClassVar[bool] = True
    """Whether the layer has a cache in every engine. False: it runs without one where a step has
    all tokens of each sequence, as in pooling."""
    shares_with: str | None = None
    """Name of an earlier layer, on the same pipeline stage, whose cache this layer reads. It stores
    nothing itself: it is given the keys that the other layer stores."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    _kept: KVCacheSpec | None = None

    @property
    def keeps(self) -> KVCacheSpec | None:
        """The spec of its cache: `kv_cache_spec`, unless the model's quantization has changed it.
        None: it keeps nothing."""
        return self.kv_cache_spec() if self._kept is None else self._kept

    def keep(self, spec: KVCacheSpec, owner: CacheLayer | None = None) -> None:
        """Replaces its spec, before weights are loaded. `owner`: the layer whose cache it shares.

        Raises UnsupportedError unless the layer's class can keep something else.
        """
        raise UnsupportedError(
            f"layer {self.prefix!r} ({type(self).__name__}) cannot keep {spec}: its class keeps "
            "what its kv_cache_spec says."
        )

    @property
    def one_way(self) -> bool:
        """Whether no token sees a later one. If so, a sequence can be computed in parts."""
        return True

    @property
    def spans(self) -> bool:
        """Whether the layer reads `BatchView.spans`."""
        return False

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """Spec of the layer's cache. None: it caches nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define kv_cache_spec")

    def attention_spec(self, device: torch.device, *, cached: bool) -> AttentionSpec | None:
        """Spec of the layer for an attention backend. None: the layer is not attention."""
        return None

    def select(
        self, device: torch.device, registry: AttentionBackendRegistry, wanted: str, *, cached: bool
    ) -> Selection:
        """Chooses the backend class of the layer. `wanted` is the option `attention_backend`.
        `cached`: the engine has a cache."""
        return Selection(type(self).__name__, self.backend, [], graphs=self.backend.graphs(None))

    def run(self, *inputs: Tensor, out: Tensor) -> Tensor:
        """Calls `compute`, which writes to `out`, and returns `out`.

        To a compiler the call is one opaque op, `toolkit_lm::cache_layer`, so the graph of the
        model stays whole. Operations of the layer before and after it, such as projections, are
        traced.
        """
        if torch.compiler.is_compiling():
            torch.ops.toolkit_lm.cache_layer(out, self.prefix, inputs)
        else:
            self.compute(*inputs, out=out)
        return out

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        """Computes the part of the forward pass that `run` calls, from `inputs`, the rows of the
        step and the layer's cache. Writes to all of `out`."""
        raise NotImplementedError(f"{type(self).__name__} must define compute")


class Attention(CacheLayer):
    """Attention over the flat batch: q [T, num_heads * head_size], k and v [T, num_kv_heads *
    head_size] -> as q.

    Head counts are this rank's. `scale` multiplies q·k. `bias` and `sinks` [num_heads] are the
    model's own modules or parameters.
    """

    params: LayerParams
    needs_cache = False
    seams = frozenset({"kv_cache_spec", "attention_spec", "select", "one_way"})
    """Members that a subclass may override although kernels compute in its place. The binding
    carries their effect."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        vllm_config: VllmConfig,
        prefix: str,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        type: AttentionType | str = AttentionType.DECODER,
        window: int | None = None,
        soft_cap: float | None = None,
        bias: AttentionBias | None = None,
        sinks: Tensor | None = None,
        spans: bool = False,
        shares_with: str | None = None,
    ) -> None:
        super().__init__(prefix)
        self.shares_with = shares_with
        num_kv_heads = num_kv_heads if num_kv_heads is not None else num_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise CheckpointError(
                f"layer {prefix!r}: {num_heads} query heads cannot share {num_kv_heads} KV heads "
                "evenly."
            )
        self.params = LayerParams(
            name=prefix,
            attention_type=next((known for known in AttentionType if known == type), type),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale if scale is not None else head_size**-0.5,
            window=window,
            soft_cap=soft_cap,
            bias=bias,
            sinks=sinks,
            spans=spans,
        )
        # Weights are found among a module's own attributes only.
        if isinstance(bias, nn.Module):
            self.bias = bias
        if isinstance(sinks, nn.Parameter):
            self.sinks = sinks
        self.dtype = vllm_config.model.dtype
        self.block_size = vllm_config.cache.block_size

    @property
    def one_way(self) -> bool:
        # Nothing is known of a plugin's type: a subclass overrides this.
        return self.params.attention_type is AttentionType.DECODER

    @property
    def spans(self) -> bool:
        return self.params.spans

    def keep(self, spec: KVCacheSpec, owner: CacheLayer | None = None) -> None:
        self._kept = spec
        if not isinstance(spec, FullSpec) or spec.scales != "layer":
            return
        if owner is None:
            self.k_scale = _new_scale("k")
            self.v_scale = _new_scale("v")
            self.params = replace(self.params, k_scale=self.k_scale, v_scale=self.v_scale)
        else:
            self.params = replace(
                self.params, k_scale=owner.params.k_scale, v_scale=owner.params.v_scale
            )

    def attention_spec(self, device: torch.device, *, cached: bool) -> AttentionSpec:
        return AttentionSpec(
            layer=self.prefix,
            type=self.params.attention_type,
            num_heads=self.params.num_heads,
            num_kv_heads=self.params.num_kv_heads,
            head_size=self.params.head_size,
            dtype=self.dtype,
            device=device.type,
            kv_cache=self.keeps if cached else None,
            window=self.params.window,
            soft_cap=self.params.soft_cap,
            sinks=self.params.sinks is not None,
            bias=self.params.bias is not None,
            offset_bias=isinstance(self.params.bias, OffsetBias),
            spans=self.params.spans,
        )

    def kv_cache_spec(self) -> KVCacheSpec | None:
        params = self.params
        if params.attention_type is AttentionType.ENCODER:
            return None
        kind = CrossSpec if params.attention_type is AttentionType.CROSS else FullSpec
        shape: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": params.num_kv_heads,
            "head_size": params.head_size,
        }
        return (
            kind(dtype=self.dtype, **shape)
            if params.window is None
            else WindowSpec(dtype=self.dtype, window=params.window, **shape)
        )

    def select(
        self, device: torch.device, registry: AttentionBackendRegistry, wanted: str, *, cached: bool
    ) -> Selection:
        return select_backend(self.attention_spec(device, cached=cached), registry, wanted)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """Computes attention of q. k and v are None if the step brings no keys: cross attention,
        once the encoder's keys are cached."""
        params = self.params
        q = q.view(-1, params.num_heads, params.head_size)
        if k is not None and v is not None:
            k = k.view(-1, params.num_kv_heads, params.head_size)
            v = v.view(-1, params.num_kv_heads, params.head_size)
        out = torch.empty_like(q)
        if torch.compiler.is_compiling():
            torch.ops.toolkit_lm.attention(q, k, v, out, self.prefix)
        else:
            attend(q, k, v, out, self.prefix)
        return out.view(-1, params.num_heads * params.head_size)


def _new_scale(kind: str) -> nn.Parameter:
    """A scale of keys or values [1], in float32, by the names that checkpoints have for it."""
    scale = nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False)
    names = f"{kind}_scale", f"{kind}_proj.{kind}_scale"
    vars(scale).update(weight_loader=_load_scale, names_beside=names)
    return scale


def _load_scale(param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
    if loaded.numel() != 1 or not loaded.is_floating_point():
        raise CheckpointError(f"has shape {list(loaded.shape)}, and one scale is read, a float")
    param.data.copy_(loaded.reshape(1))


def attend(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, layer: str) -> None:
    """Stores k and v in the layer's cache, and writes attention to `out`. `layer` is the name of
    the layer. This is the op `toolkit_lm::attention`."""
    binding, metadata = current(layer)
    backend: Any = binding.backend
    call = AttentionCall(binding.params, q, k, v, binding.kv_cache, metadata, out)
    if binding.stores and k is not None:
        backend.write_kv(call)
    backend.forward(call)


def _compute(out: Tensor, layer: str, inputs: Sequence[Tensor]) -> None:
    """Computes the CacheLayer of that name, which writes to `out`. This is the op
    `toolkit_lm::cache_layer`."""
    op_layer(layer).compute(*inputs, out=out)


# To a compiler attention is one opaque op: whatever a backend does, the model's graph is whole.
_library: Any = torch.library.Library("toolkit_lm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("attention(Tensor q, Tensor? k, Tensor? v, Tensor(a!) out, str layer) -> ()")
_library.impl("attention", attend, "CompositeExplicitAutograd")
torch.library.register_fake("toolkit_lm::attention", lambda q, k, v, out, layer: None, lib=_library)
_library.define("cache_layer(Tensor(a!) out, str layer, Tensor[] inputs) -> ()")
_library.impl("cache_layer", _compute, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm::cache_layer", lambda out, layer, inputs: None, lib=_library
)
