"""FlashAttnBackend: paged attention by FlashAttention."""

from __future__ import annotations

from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchView,
    GraphSupport,
    GroupSetup,
    common_refusal,
)
from toolkit_lm.kv import FullSpec
from toolkit_lm_paged_attention import PagedBackend, PagedStep, keys_and_values
from torch import Tensor

from toolkit_lm_flash_attn.arguments import LayerKey, make_arguments
from toolkit_lm_flash_attn.graphs import FixedSteps
from toolkit_lm_flash_attn.kernel import Kernel, find_kernel, refusal


class FlashAttnBackend(PagedBackend):
    """Attention of all types on NVIDIA GPUs.

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
        self._fixed = FixedSteps(setup.device)

    def build(self, batch: BatchView) -> PagedStep:
        if batch.is_fixed:
            self._fixed.fill(batch)
        return PagedStep(batch, self.store(batch))

    def forward(self, call: AttentionCall) -> None:
        layer = call.layer
        step: PagedStep = call.metadata
        block_size = None if call.kv_cache is None else call.kv_cache[0].shape[2]
        paged = self.kernel.pages(block_size)
        key = LayerKey(layer.attention_type, layer.window, block_size, paged)
        make = self._fixed.arguments if step.batch.is_fixed else make_arguments
        arguments = step.plan(key, make)
        if arguments.max_keys == 0:
            call.out.zero_()
            return
        keys: Tensor
        values: Tensor
        if paged:
            assert call.kv_cache is not None
            keys, values = call.kv_cache[0].unbind(1)
        else:
            keys, values = keys_and_values(call, arguments.keys)
        call.out.copy_(
            self.kernel.attend(call.q, keys, values, arguments, layer.scale, layer.soft_cap)
        )


def lacks(kernel: Kernel, spec: AttentionSpec) -> str | None:
    """Features that a layer needs and the kernel does not have. None: it has all."""
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
