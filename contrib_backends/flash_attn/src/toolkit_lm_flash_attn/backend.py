"""FlashAttnBackend: paged attention by FlashAttention."""

from __future__ import annotations

from toolkit_lm.attention import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    BatchView,
    GraphSupport,
    GroupSetup,
    LayerParams,
    common_refusal,
)
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
from torch import Tensor

from toolkit_lm_flash_attn.arguments import LayerKey, Metadata
from toolkit_lm_flash_attn.graphs import FixedMetadata, FixedSteps
from toolkit_lm_flash_attn.kernel import Kernel, find_kernel, refusal


class FlashAttnBackend(AttentionBackend):
    """Attention of all types on NVIDIA GPUs. A page holds (2, block_size, num_kv_heads, head_size):
    keys before values.

    A step is one call of the kernel, without padding. Where the kernel reads the cache's pages,
    CUDA graphs may hold decodes; elsewhere the keys are gathered for it. In an encoder, a window
    hides keys at a distance of `window` or more on both sides.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if spec.device != "cuda":
            return f"no kernel for device {spec.device}, only for cuda"
        if (reason := refusal()) is not None:
            return reason
        kernel = find_kernel()
        assert kernel is not None
        return lacks(kernel, spec)

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, FullSpec)
        return [PageTensor((2, spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype)]

    @classmethod
    def graphs(cls, spec: AttentionSpec | None) -> GraphSupport | str:
        kernel = cls.find_kernel()
        if kernel is None:
            return "no FlashAttention is here"
        if (
            spec is None
            or spec.type is not AttentionType.DECODER
            or not isinstance(spec.kv_cache, FullSpec)
        ):
            return "only layers of decoders have as many queries in each step"
        if kernel.page_step is None:
            return (
                f"FlashAttention of {kernel.name} reads no pages, so that all keys are gathered "
                "for it, as many as there are"
            )
        if not kernel.pages(block_size := spec.kv_cache.block_size):
            return (
                f"FlashAttention of {kernel.name} reads pages of a multiple of "
                f"{kernel.page_step} tokens, and block_size is {block_size}"
            )
        return GraphSupport.DECODE

    @classmethod
    def find_kernel(cls) -> Kernel | None:
        return find_kernel()

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        kernel = self.find_kernel()
        assert kernel is not None
        self.kernel = kernel
        self._fixed = (
            None if setup.kv_cache is None else FixedSteps(setup.kv_cache.block_size, setup.device)
        )

    def build(self, batch: BatchView) -> Metadata | FixedMetadata:
        if batch.is_fixed:
            assert self._fixed is not None, "graphs hold layers that cache something alone"
            return self._fixed.build(batch)
        slots = batch.slot_mapping
        stored = slots.ge(0).nonzero()[:, 0] if batch.has_padding and slots is not None else None
        return Metadata(batch, stored)

    def write_kv(
        self,
        layer: LayerParams,
        k: Tensor,
        v: Tensor,
        kv_cache: tuple[Tensor, ...],
        meta: Metadata | FixedMetadata,
    ) -> None:
        keys, values = _halves(kv_cache)
        places = meta.slots(kv_cache[0].shape[2])
        if meta.stored is not None:
            k, v = k[meta.stored], v[meta.stored]
        keys.index_copy_(0, places, k)
        values.index_copy_(0, places, v)

    def forward(
        self,
        layer: LayerParams,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: tuple[Tensor, ...] | None,
        meta: Metadata | FixedMetadata,
        out: Tensor,
    ) -> None:
        block_size = None if kv_cache is None else kv_cache[0].shape[2]
        paged = self.kernel.pages(block_size)
        given = meta.arguments(LayerKey(layer.attention_type, layer.window, block_size, paged))
        if given.max_keys == 0:
            out.zero_()
            return
        if paged:
            assert kv_cache is not None
            keys, values = kv_cache[0].unbind(1)
        elif given.keys is None or kv_cache is None:
            assert k is not None and v is not None
            keys, values = (k, v) if given.keys is None else (k[given.keys], v[given.keys])
        else:
            keys, values = (half.index_select(0, given.keys) for half in _halves(kv_cache))
        out.copy_(self.kernel.attend(q, keys, values, given, layer.scale, layer.soft_cap))


def lacks(kernel: Kernel, spec: AttentionSpec) -> str | None:
    """What a layer needs and the kernel has not; None: nothing."""
    if (reason := common_refusal(spec, kernel.dtypes)) is not None:
        return reason
    if spec.head_size % kernel.head_step or spec.head_size > kernel.most_head_size:
        return (
            f"head_size {spec.head_size} is not a multiple of {kernel.head_step} up to "
            f"{kernel.most_head_size}"
        )
    if spec.soft_cap is not None and not kernel.soft_caps:
        return (
            f"FlashAttention of {kernel.name} has no soft caps; that of the package flash_attn has"
        )
    if asked := [name for name in ("bias", "sinks", "spans") if getattr(spec, name)]:
        return f"FlashAttention has no {' and no '.join(asked)}"
    return None


def _halves(kv_cache: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The cache as [N, num_kv_heads, head_size], from the first key on and from the first value on:
    one index finds both."""
    vectors = kv_cache[0].view(-1, *kv_cache[0].shape[3:])
    return vectors, vectors[kv_cache[0].shape[2] :]
