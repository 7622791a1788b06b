"""The layers that keep something of each sequence. They declare what they need; the runner binds a
backend and a cache to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from toolkit_lm.attention.backend import AttentionBias, CacheBackend, LayerParams, OffsetBias
from toolkit_lm.attention.context import current, op_layer
from toolkit_lm.attention.selector import Selection, select_backend
from toolkit_lm.attention.spec import AttentionSpec, AttentionType
from toolkit_lm.bypass import Bypassable
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.kv import CrossSpec, FullSpec, KVCacheSpec, WindowSpec
from toolkit_lm.plugin import AttentionBackendRegistry


class CacheLayer(Bypassable):
    """Base of layers that keep something of each sequence in the KV cache: attention, a recurrence.

    `prefix` is the layer's name in the checkpoint, and its key in the engine. In its forward pass,
    `current(prefix)` gives the layer its binding and the metadata that its backend built for the
    step.
    """

    backend: type[CacheBackend]
    """How it uses the cache, unless `select` chooses among several."""
    params: Any = None
    """What the backend is told of the layer."""
    needs_cache: ClassVar[bool] = True
    """It has a cache in every engine. False: where nothing comes after a prompt, it can do without,
    since a step has all tokens of each sequence."""
    shares_with: str | None = None
    """Name of a layer before it, on the same pipeline stage, whose cache it reads. It keeps and
    stores nothing: what it is given is what the other one stores."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    @property
    def one_way(self) -> bool:
        """No token sees what comes after it, so that a sequence can be computed in parts."""
        return True

    @property
    def spans(self) -> bool:
        """It reads `BatchView.spans`."""
        return False

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """What this layer keeps; None when it keeps nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define kv_cache_spec")

    def attention_spec(self, device: torch.device, *, cached: bool) -> AttentionSpec | None:
        """What this layer asks of an attention backend; None: it is no attention."""
        return None

    def select(
        self, device: torch.device, registry: AttentionBackendRegistry, wanted: str, *, cached: bool
    ) -> Selection:
        """The class of its backend, and why. `wanted` is the option `attention_backend`; `cached`:
        the engine has a cache."""
        return Selection(type(self).__name__, self.backend, [], graphs=self.backend.graphs(None))

    def run(self, *inputs: Tensor, out: Tensor) -> Tensor:
        """Has `compute` write to `out`, and returns it.

        To a compiler it is one opaque op, `toolkit_lm::cache_layer`, so that the model's graph is
        whole. What a layer does before and after it, such as its projections, is traced.
        """
        if torch.compiler.is_compiling():
            torch.ops.toolkit_lm.cache_layer(out, self.prefix, inputs)
        else:
            self.compute(*inputs, out=out)
        return out

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        """Writes what the layer makes of `inputs`, the step's rows and its cache to all of `out`:
        the part of the forward pass that `run` calls."""
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
    """What a subclass may override while kernels compute in its place: its binding states what they
    give."""

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
        # Of a plugin's type nothing is known: a subclass says otherwise.
        return self.params.attention_type is AttentionType.DECODER

    @property
    def spans(self) -> bool:
        return self.params.spans

    def attention_spec(self, device: torch.device, *, cached: bool) -> AttentionSpec:
        return AttentionSpec(
            layer=self.prefix,
            type=self.params.attention_type,
            num_heads=self.params.num_heads,
            num_kv_heads=self.params.num_kv_heads,
            head_size=self.params.head_size,
            dtype=self.dtype,
            device=device.type,
            kv_cache=self.kv_cache_spec() if cached else None,
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
        shape = {
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
        """k and v are None where the step brings no keys: cross attention, once the encoder's are
        cached."""
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


def attend(q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, layer: str) -> None:
    """Stores k and v in the cache of the layer of that name, and writes attention to out. The op
    `toolkit_lm::attention`."""
    binding, meta = current(layer)
    backend: Any = binding.backend
    if binding.stores and k is not None:
        backend.write_kv(binding.params, k, v, binding.kv_cache, meta)
    backend.forward(binding.params, q, k, v, binding.kv_cache, meta, out)


def _compute(out: Tensor, layer: str, inputs: Sequence[Tensor]) -> None:
    """Writes what the CacheLayer of that name computes to out. The op `toolkit_lm::cache_layer`."""
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
