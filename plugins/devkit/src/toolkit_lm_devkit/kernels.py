"""KernelsConformance: what all kernels of layers must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import Kernels, ReplicatedLinear, VocabParallelEmbedding, construction
from torch import Tensor

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.equality import assert_bf16_error

TOLERANCE = 1e-5
"""Most difference to the exact result in float32, by its greatest element."""
EPS = 1e-6
ROWS = (1, 2, 5, 17, 64)

Operation = Callable[[Kernels, Tensor, "Tensors"], Tensor]


class Tensors:
    """Random weights of a size and dtype, and angles for 64 tokens."""

    def __init__(self, size: int, dtype: torch.dtype, device: str = "cpu") -> None:
        random = torch.Generator().manual_seed(size)
        self.size = size
        self.dtype = dtype
        self.weight, self.bias = (torch.randn(size, generator=random).to(dtype) for _ in range(2))
        self.matrix = torch.randn(24, size, generator=random).mul(size**-0.5).to(dtype)
        self.residual = torch.randn(ROWS[-1], size, generator=random).to(dtype)
        angles = torch.rand(ROWS[-1], 1, 16, generator=random) * 6
        self.cos = torch.cat([angles.cos(), angles.cos()], -1).to(dtype)
        self.sin = torch.cat([-angles.sin(), angles.sin()], -1).to(dtype)
        self.__dict__.update(
            {
                name: value.to(device)
                for name, value in self.__dict__.items()
                if isinstance(value, Tensor)
            }
        )

    def to(self, dtype: torch.dtype) -> Tensors:
        """The same numbers in a wider dtype."""
        other = Tensors(self.size, dtype)
        other.__dict__.update(
            {
                name: value.to(dtype)
                for name, value in self.__dict__.items()
                if isinstance(value, Tensor)
            }
        )
        return other


def _product(kernels: Kernels, x: Tensor, t: Tensors) -> Tensor:
    """Product of the linear method that the kernels give a layer. No model computes in float64."""
    if t.dtype is torch.float64:
        return x @ t.matrix.T
    config = VllmConfig.default(dtype=str(t.dtype).removeprefix("torch."))
    with construction(kernels=kernels), torch.device(x.device):
        layer: Any = ReplicatedLinear(t.size, len(t.matrix), vllm_config=config, prefix="layer")
    layer.weight.data.copy_(t.matrix)
    layer.requires_grad_(False)
    layer.method.process(layer)
    out: Tensor = layer(x)
    return out


def _rotated(interleaved: bool) -> Operation:
    def rotate(kernels: Kernels, x: Tensor, t: Tensors) -> Tensor:
        heads = x[:, None, :].repeat(1, 3, 1) if t.size >= 32 else x.new_zeros(len(x), 3, 32)
        return kernels.rotate(heads, t.cos[: len(x)], t.sin[: len(x)], interleaved).flatten(1)

    return rotate


OPERATIONS: Mapping[str, Operation] = {
    "rms_norm": lambda kernels, x, t: kernels.rms_norm(x, t.weight, EPS),
    "rms_norm of heads": lambda kernels, x, t: kernels.rms_norm(
        x[:, None].expand(-1, 3, -1), t.weight, EPS
    ).flatten(1),
    "rms_norm with a float32 weight": lambda kernels, x, t: kernels.rms_norm(
        x, t.weight.to(torch.promote_types(x.dtype, torch.float32)), EPS
    ),
    "add_rms_norm": lambda kernels, x, t: torch.cat(
        kernels.add_rms_norm(x, t.residual[: len(x)], t.weight, EPS), -1
    ),
    "layer_norm": lambda kernels, x, t: kernels.layer_norm(x, t.weight, t.bias, (t.size,), EPS),
    "layer_norm without a weight": lambda kernels, x, t: kernels.layer_norm(
        x, None, None, (t.size,), EPS
    ),
    "soft_cap": lambda kernels, x, t: kernels.soft_cap(x.clone(), 2.0),
    "rotate": _rotated(interleaved=False),
    "rotate interleaved": _rotated(interleaved=True),
    "linear": lambda kernels, x, t: kernels.linear(x, t.matrix, t.bias[:1].expand(24).contiguous()),
    "linear_method": _product,
}


class KernelsConformance(Conformance):
    """Subclass it as `class TestMine(KernelsConformance)`, and name `kernels`.

    Every operation is compared with plain torch in float64, on the device, in each dtype, and with
    itself on fewer rows.
    """

    kernels: ClassVar[type[Kernels]]
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16)
    sizes: ClassVar[Sequence[int]] = (64, 48, 7)
    """Sizes that are normed and multiplied: some are multiples of a vector's lanes, some are
    not."""
    bitwise: ClassVar[bool] = True
    """Whether a row's result has the same bits in any batch. False: it may differ by rounding."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            "operation": OPERATIONS,
            "size": {str(size): size for size in cls.sizes},
            "dtype": {str(dtype).removeprefix("torch."): dtype for dtype in cls.dtypes},
        }

    @classmethod
    def rows(cls, size: int, dtype: torch.dtype) -> Tensor:
        """[64, size]"""
        return torch.randn(ROWS[-1], size, generator=torch.Generator().manual_seed(1)).to(
            cls.device, dtype
        )

    def assert_same(self, ours: Tensor, expected: Tensor, label: str) -> None:
        rounding = (
            0.0
            if self.bitwise
            else 4 * torch.finfo(ours.dtype).eps * max(expected.abs().max().item(), 1)
        )
        torch.testing.assert_close(
            ours, expected, atol=rounding, rtol=0, msg=lambda text: f"{label}: {text}"
        )

    def test_it_computes_what_torch_does(
        self, operation: Operation, size: int, dtype: torch.dtype
    ) -> None:
        tensors = Tensors(size, dtype, self.device)
        x = self.rows(size, dtype)
        ours = operation(self.kernels(), x, tensors)
        wide = tensors.to(torch.float64)
        exact = operation(Kernels(), x.double(), wide)
        assert (ours.shape, ours.dtype) == (exact.shape, dtype)
        if dtype is torch.float32:
            limit = TOLERANCE * max(exact.abs().max().item(), 1)
            torch.testing.assert_close(ours.double(), exact, atol=limit, rtol=0)
        elif exact.any():
            assert_bf16_error([ours], [operation(Kernels(), x, tensors)], [exact])

    def test_a_row_is_computed_alike_whatever_is_beside_it(
        self, operation: Operation, size: int, dtype: torch.dtype
    ) -> None:
        kernels = self.kernels()
        tensors = Tensors(size, dtype, self.device)
        x = self.rows(size, dtype)
        whole = operation(kernels, x, tensors)
        for rows in ROWS:
            self.assert_same(
                operation(kernels, x[:rows], tensors),
                whole[:rows],
                f"{rows} rows alone differ from those of {len(x)}",
            )

    def test_what_it_is_given_stays(
        self, operation: Operation, size: int, dtype: torch.dtype
    ) -> None:
        tensors = Tensors(size, dtype, self.device)
        x = self.rows(size, dtype)
        before = {
            name: value.clone()
            for name, value in tensors.__dict__.items()
            if isinstance(value, Tensor)
        }
        operation(self.kernels(), x, tensors)
        assert torch.equal(x, self.rows(size, dtype)), "x is changed"
        changed = [
            name for name, value in before.items() if not torch.equal(getattr(tensors, name), value)
        ]
        assert not changed, f"{changed} are changed"

    def test_rows_need_not_lie_side_by_side(
        self, operation: Operation, size: int, dtype: torch.dtype
    ) -> None:
        kernels = self.kernels()
        tensors = Tensors(size, dtype, self.device)
        x = self.rows(size, dtype)
        apart = x.new_zeros(len(x), 2 * size)
        apart[:, :size] = x
        self.assert_same(
            operation(kernels, apart[:, :size], tensors),
            operation(kernels, x, tensors),
            "rows that lie apart differ",
        )

    def test_no_rows_give_none(self, operation: Operation, size: int, dtype: torch.dtype) -> None:
        assert (
            len(
                operation(
                    self.kernels(), self.rows(size, dtype)[:0], Tensors(size, dtype, self.device)
                )
            )
            == 0
        )

    def test_likeliest_is_the_first_of_the_greatest(self, size: int, dtype: torch.dtype) -> None:
        scores = self.rows(size, dtype)
        scores[0] = 1
        scores[1] = -torch.inf
        scores[2, 3:5] = 50
        scores[3, 1] = torch.nan
        best, indices = self.kernels().likeliest(scores)
        expected, places = torch.max(scores, dim=-1)
        torch.testing.assert_close(best.to(dtype), expected, atol=0, rtol=0, equal_nan=True)
        assert indices.tolist() == places.tolist()
        assert (indices.dtype, best.shape) == (torch.int64, (len(scores),))

    @pytest.mark.parametrize("outputs", [40, 64, 7])
    def test_a_weight_can_be_shown(self, outputs: int) -> None:
        """`LinearMethod.dequantized` of the kernels' own method is the weight that was loaded."""
        config = VllmConfig.default()
        with construction(kernels=self.kernels()):
            layer: Any = ReplicatedLinear(48, outputs, vllm_config=config, prefix="proj")
        weight = torch.randn(outputs, 48)
        layer.weight.weight_loader(layer.weight, weight)
        layer.requires_grad_(False)
        layer.method.process(layer)
        assert torch.equal(layer.method.dequantized(), weight)

    def test_embeddings_are_looked_up(self) -> None:
        """A table may be the head's weight as well: kernels leave it as it is, or find its rows."""
        config = VllmConfig.default({"vocab_size": 32})
        with construction(kernels=self.kernels()):
            table: Any = VocabParallelEmbedding(32, 16, vllm_config=config, prefix="embed_tokens")
        rows = torch.randn(32, 16)
        table.weight.data.copy_(rows)
        table.requires_grad_(False)
        table.method.process(table)
        assert torch.equal(table(torch.arange(32)), rows)

    def test_a_step_is_entered_by_the_thread_that_computes_it(self) -> None:
        kernels = self.kernels()
        before = torch.get_num_threads()
        for tokens in (1, 4096):
            with kernels.step(tokens):
                kernels.rms_norm(
                    torch.randn(min(tokens, 8), 64, device=self.device),
                    torch.ones(64, device=self.device),
                    EPS,
                )
            assert torch.get_num_threads() == before, "a step leaves another number of threads"

    def test_a_refusal_is_a_reason(self) -> None:
        for device in ("cpu", "cuda", "meta"):
            refusal = self.kernels.refuses(VllmConfig.default(device=device))
            assert refusal is None or (isinstance(refusal, str) and refusal.strip())
