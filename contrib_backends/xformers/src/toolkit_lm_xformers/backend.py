"""XformersBackend: paged attention by xFormers."""

from __future__ import annotations

from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    AttentionType,
    LayerParams,
    common_refusal,
)
from toolkit_lm_paged_attention import PagedBackend, PagedStep, halves, keys_and_values
from torch import Tensor

from toolkit_lm_xformers import kernel
from toolkit_lm_xformers.layout import LayerKey, Layout, prepare

_DTYPES = ("bfloat16", "float16")
_HEAD_STEP = 8
_MOST_HEAD_SIZE = 256
_FEATURES = {
    "soft_cap": "soft caps",
    "sinks": "sinks",
    "bias": "biases that are functions of positions",
    "spans": "spans",
}


class XformersBackend(PagedBackend):
    """Attention of all types on NVIDIA GPUs.

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

    def forward(self, call: AttentionCall) -> None:
        layer = call.layer
        out = call.out
        step: PagedStep = call.metadata
        block_size = None if call.kv_cache is None else call.kv_cache[0].shape[2]
        # The masks of pages know no windows.
        paged = layer.window is None and self.reads_pages(block_size)
        key = LayerKey(layer.attention_type, layer.window, block_size, paged)
        layout, mask = step.plan(key, prepare)
        if layout.queries is not None:
            # The other rows have no keys.
            out.zero_()
        if mask is None:
            return
        keys, values = _keys_and_values(call, layout)
        queries = call.q if layout.queries is None else call.q[layout.queries]
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
    """Features that a layer needs and the kernels do not have. None: they have all."""
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


def _keys_and_values(call: AttentionCall, layout: Layout) -> tuple[Tensor, Tensor]:
    """The whole cache where the kernels read its pages; else [K, num_kv_heads, head_size] each."""
    if layout.pages is None:
        return keys_and_values(call, layout.keys)
    assert call.kv_cache is not None
    keys, values = halves(call.kv_cache)
    # A page number finds keys in the one, and their values in the other.
    return keys[: len(values)], values


def _grouped(q: Tensor, layer: LayerParams) -> Tensor:
    """[1, Q, kv_heads, group, size] of q [Q, heads, size]."""
    return q.view(1, -1, layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, layer.head_size)


def _shared(x: Tensor, layer: LayerParams) -> Tensor:
    """[1, K, kv_heads, group, size] of x [K, kv_heads, size], without a copy."""
    return x[None, :, :, None].expand(-1, -1, -1, layer.num_heads // layer.num_kv_heads, -1)
