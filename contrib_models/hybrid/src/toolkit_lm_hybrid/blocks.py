"""Block-diagonal products: each block multiplies rows of its own, such as those of a head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from toolkit_lm.model import NO_EPILOGUE, GroupedProduct, Kernels, LinearMethod, LinearSpec, Shard
from torch import Tensor, nn

HeadProduct = Callable[[Tensor], Tensor]
"""x [N, T, inputs] -> [N, T, outputs]: each of N heads by its own weight."""


class TorchBlocks:
    """The product of N blocks by torch: a HeadProduct."""

    made_of_weights = True

    def __init__(self, blocks: Tensor) -> None:
        """`blocks`: [N, outputs, inputs]."""
        self._blocks = blocks

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x, self._blocks.mT)


class BlockProduct:
    """The product of N blocks in one call of the kernels: a HeadProduct."""

    made_of_weights = True
    """It has a copy of weights: who changes these puts None in its place."""

    def __init__(self, product: GroupedProduct) -> None:
        self._product = product

    @staticmethod
    def of(kernels: Kernels, blocks: Tensor) -> BlockProduct | None:
        """The product of copies of `blocks` [N, outputs, inputs]. None: the kernels cannot group
        them, or they are on another device than the CPU."""
        if blocks.device.type != "cpu":
            return None
        product = kernels.group([_method_of(kernels, block) for block in blocks])
        return None if product is None else BlockProduct(product)

    def __call__(self, x: Tensor, biases: Tensor | None = None) -> Tensor:
        """x [N, T, inputs], biases [N, outputs] -> [N, T, outputs]."""
        count, tokens, size = x.shape
        ends = torch.arange(1, count + 1, dtype=torch.int32) * tokens
        out = self._product(x.reshape(count * tokens, size), ends, biases, NO_EPILOGUE)
        return out.view(count, tokens, out.shape[1])


def by_head(kernels: Kernels, blocks: Tensor) -> HeadProduct:
    """The product of blocks [N, outputs, inputs], by the kernels or else by torch."""
    return BlockProduct.of(kernels, blocks) or TorchBlocks(blocks)


def _method_of(kernels: Kernels, block: Tensor) -> LinearMethod:
    """A linear method with the weight `block` [outputs, inputs]."""
    outputs, inputs = block.shape
    spec = LinearSpec(
        kind="linear",
        prefix="block",
        inputs=Shard.whole(inputs),
        outputs=(Shard.whole(outputs),),
        dtype=block.dtype,
    )
    holder = nn.Module()
    method = kernels.linear_method(spec)
    with torch.device("cpu"):
        method.create(holder, spec)
    holder.requires_grad_(False)
    holder.get_parameter("weight").data.copy_(block)
    method.process(holder)
    return method
