"""Block-diagonal products, by kernels that group weights and by torch."""

import torch
from toolkit_lm.model import Kernels
from toolkit_lm_hybrid.blocks import BlockProduct, by_head


class Grouping(Kernels):
    """Multiplies a weight at a time."""

    def group(self, methods):
        def product(rows, ends, biases, epilogue):
            assert ends.dtype is torch.int32
            pieces = rows.tensor_split(ends[:-1].long())
            return torch.cat(
                [
                    methods[i].multiply(piece, None if biases is None else biases[i])
                    for i, piece in enumerate(pieces)
                ]
            )

        return product


def test_each_block_multiplies_its_own_rows():
    torch.manual_seed(0)
    blocks = torch.randn(3, 5, 4)
    biases = torch.randn(3, 5)
    product = BlockProduct.of(Grouping(), blocks)
    assert product is not None
    for tokens in (7, 1, 0):
        x = torch.randn(tokens, 3, 4).transpose(0, 1)
        exact = torch.bmm(x, blocks.mT)
        torch.testing.assert_close(product(x), exact)
        torch.testing.assert_close(product(x, biases), exact + biases[:, None])
        torch.testing.assert_close(by_head(Grouping(), blocks)(x), exact)


def test_torch_multiplies_where_kernels_group_nothing():
    blocks = torch.randn(3, 5, 4)
    x = torch.randn(3, 7, 4)
    assert BlockProduct.of(Kernels(), blocks) is None
    assert torch.equal(by_head(Kernels(), blocks)(x), torch.bmm(x, blocks.mT))
