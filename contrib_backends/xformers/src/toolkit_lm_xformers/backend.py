"""XformersBackend: paged attention by xFormers."""

from __future__ import annotations

from toolkit_lm.attention import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    BatchView,
    LayerParams,
    common_refusal,
)
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
from torch import Tensor

from toolkit_lm_xformers import kernel
from toolkit_lm_xformers.layout import LayerKey, Layout, Metadata

_DTYPES = ("bfloat16", "float16")
_HEAD_STEP = 8
_MOST_HEAD_SIZE = 256
_FEATURES = {
    "soft_cap": "soft caps",
    "sinks": "sinks",
    "bias": "biases that are functions of positions",
    "spans": "spans",
}


class XformersBackend(AttentionBackend):
    """Attention of all types on NVIDIA GPUs. A page holds (2, block_size, num_kv_heads, head_size):
    keys before values.

    A step is one call, with a block diagonal mask and without padding. Where the kernels cannot
    read the cache's pages, the keys are gathered for them.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if (reason := kernel.missing()) is not None:
            return reason
        if spec.device != "cuda":
            return f"no kernel for device {spec.device}, only for cuda"
        return lacks(spec) or kernel.refusal()

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, FullSpec)
        return [PageTensor((2, spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype)]

    def build(self, batch: BatchView) -> Metadata:
        slots = batch.slot_mapping
        stored = slots.ge(0).nonzero()[:, 0] if batch.has_padding and slots is not None else None
        return Metadata(batch, stored)

    def write_kv(
        self, layer: LayerParams, k: Tensor, v: Tensor, kv_cache: tuple[Tensor, ...], meta: Metadata
    ) -> None:
        vectors = _vectors(kv_cache)
        block_size = kv_cache[0].shape[2]
        places = meta.slots(block_size)
        if meta.stored is not None:
            k, v = k[meta.stored], v[meta.stored]
        vectors.index_copy_(0, places, k)
        # A value is block_size after its key.
        vectors[block_size:].index_copy_(0, places, v)

    def forward(
        self,
        layer: LayerParams,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: tuple[Tensor, ...] | None,
        meta: Metadata,
        out: Tensor,
    ) -> None:
        block_size = None if kv_cache is None else kv_cache[0].shape[2]
        # The masks of pages know no windows.
        paged = layer.window is None and self.reads_pages(block_size)
        layout, mask = meta.prepared(
            LayerKey(layer.attention_type, layer.window, block_size, paged)
        )
        if layout.queries is not None:
            # The other rows have no keys.
            out.zero_()
        if mask is None:
            return
        keys, values = _keys_and_values(layout, k, v, kv_cache)
        queries = q if layout.queries is None else q[layout.queries]
        found = self.attend(
            _grouped(queries, layer),
            _shared(keys, layer),
            _shared(values, layer),
            mask,
            layer.scale,
        ).view(queries.shape)
        if layout.queries is None:
            out.copy_(found)
        else:
            out.index_copy_(0, layout.queries, found)

    attend = staticmethod(kernel.attend)
    reads_pages = staticmethod(kernel.reads_pages)


def lacks(spec: AttentionSpec) -> str | None:
    """What a layer needs and the kernels have not; None: nothing."""
    if (reason := common_refusal(spec, _DTYPES)) is not None:
        return reason
    if spec.head_size % _HEAD_STEP or spec.head_size > _MOST_HEAD_SIZE:
        return (
            f"head_size {spec.head_size} is not a multiple of {_HEAD_STEP} up to {_MOST_HEAD_SIZE}"
        )
    if asked := [words for name, words in _FEATURES.items() if getattr(spec, name)]:
        return f"the kernels of xFormers have no {' and no '.join(asked)}"
    if spec.window is not None and spec.type is AttentionType.ENCODER:
        return "the masks of xFormers have no window on both sides of a token"
    return None


def _vectors(kv_cache: tuple[Tensor, ...]) -> Tensor:
    """The cache as [num_blocks * 2 * block_size, num_kv_heads, head_size]."""
    return kv_cache[0].view(-1, *kv_cache[0].shape[3:])


def _keys_and_values(
    layout: Layout, k: Tensor | None, v: Tensor | None, kv_cache: tuple[Tensor, ...] | None
) -> tuple[Tensor, Tensor]:
    """Each [K, num_kv_heads, head_size], as the layout says; or the whole cache."""
    if layout.pages is None and (layout.keys is None or kv_cache is None):
        assert k is not None and v is not None
        return (k, v) if layout.keys is None else (k[layout.keys], v[layout.keys])
    assert kv_cache is not None
    vectors = _vectors(kv_cache)
    block_size = kv_cache[0].shape[2]
    if layout.keys is None:
        # A page number finds keys in the one, and their values in the other.
        return vectors[:-block_size], vectors[block_size:]
    return vectors.index_select(0, layout.keys), vectors.index_select(0, layout.keys + block_size)


def _grouped(q: Tensor, layer: LayerParams) -> Tensor:
    """[1, Q, kv_heads, group, size] of q [Q, heads, size]."""
    return q.view(1, -1, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_size)


def _shared(x: Tensor, layer: LayerParams) -> Tensor:
    """[1, K, kv_heads, group, size] of x [K, kv_heads, size], without a copy."""
    return x[None, :, :, None].expand(-1, -1, -1, layer.num_heads // layer.num_kv_heads, -1)
