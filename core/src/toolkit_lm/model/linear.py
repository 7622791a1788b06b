"""Linear layers that hold one rank's shard. Weights are [output, input], as in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from toolkit_lm.bypass import Bypassable, look_again
from toolkit_lm.config import ParallelConfig, VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import ConfigError
from toolkit_lm.model.activation import get_activation
from toolkit_lm.model.kernels import choose_kernels, choose_method, choose_sources
from toolkit_lm.model.linear_method import NO_EPILOGUE, Epilogue, LinearMethod, LinearSpec, Rows
from toolkit_lm.model.parameters import Shard, ShardLoader, new_parameter, torch_dtype


class LinearBase(Bypassable):
    """Base of layers with a weight W [outputs, inputs], which a linear method holds: x [T,
    input_size] -> x W^T + b [T, output_size].

    The sizes are this rank's. The method names the weight's parameters; an unquantized one is
    `weight`.
    """

    seams = frozenset()

    def __init__(self, spec: LinearSpec, *, bias: bool = False) -> None:
        super().__init__()
        known = choose_sources()
        sources = known.of(spec.prefix)
        tensors = tuple(known.tensors(source) for source in sources)
        spec = replace(spec, sources=sources, tensors=tensors if any(tensors) else ())
        self.spec = spec
        self.prefix = spec.prefix
        self.output_size, self.input_size = spec.shape
        self.rows: Rows | Tensor = Rows.FLAT
        """The rows that the layer gets."""
        self.method = choose_method(spec)
        self.method.create(self, spec)
        self.bias = (
            new_parameter((self.output_size,), spec.dtype, ShardLoader(spec.outputs))
            if bias
            else None
        )

    def forward(self, x: Tensor, rows: Rows | Tensor | None = None) -> Tensor:
        """`rows`: the rows of this call; None: the rows that the layer always gets."""
        return self.method.apply(x, self.bias, rows=self.rows if rows is None else rows)

    def wrap(self, make: Callable[[LinearMethod], LinearMethod]) -> None:
        """Wraps the layer's method, once its weight is loaded. `make` gets the method, and usually
        returns a WrappingMethod.

        From then on nothing computes in the layer's place, not even kernels that fused it.
        """
        self.method = make(self.method)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "method":
            look_again()

    def extra_repr(self) -> str:
        method = type(self.method).__name__
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, "
            f"bias={self.bias is not None}, method={method}"
        )


class _Linear(LinearBase):
    """All inputs, and this rank's share of the outputs."""

    def __init__(
        self,
        input_size: int,
        outputs: Sequence[Shard],
        *,
        bias: bool,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        dtype = torch_dtype(vllm_config.model.dtype)
        spec = LinearSpec(
            kind="linear",
            prefix=prefix,
            inputs=Shard.whole(input_size),
            outputs=tuple(outputs),
            dtype=dtype,
        )
        super().__init__(spec, bias=bias)


class ReplicatedLinear(_Linear):
    """Every rank holds the whole weight: x [T, input_size] -> [T, output_size]."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__(
            input_size,
            [Shard.whole(output_size)],
            bias=bias,
            vllm_config=vllm_config,
            prefix=prefix,
        )


class MergedColumnParallelLinear(_Linear):
    """Several projections of one input, each split by its outputs: x [T, input_size] -> [T,
    sum(output_sizes) / ranks].

    A rank's output is its share of the first projection, then of the second, and so on.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        *,
        bias: bool = False,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        outputs = [
            Shard.even(size, vllm_config.parallel, f"outputs of {prefix}") for size in output_sizes
        ]
        super().__init__(input_size, outputs, bias=bias, vllm_config=vllm_config, prefix=prefix)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """Split by its outputs: x [T, input_size] -> activation(x W^T + b) [T, output_size / ranks]."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        activation: str | None = None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        """`activation` is a name that `get_activation` knows."""
        super().__init__(
            input_size, [output_size], bias=bias, vllm_config=vllm_config, prefix=prefix
        )
        if activation is not None:
            get_activation(activation)
        self.activation = activation
        self.epilogue = NO_EPILOGUE if activation is None else Epilogue(activation)

    def forward(self, x: Tensor, rows: Rows | Tensor | None = None) -> Tensor:
        return self.method.apply(
            x, self.bias, self.epilogue, rows=self.rows if rows is None else rows
        )


class GatedColumnParallelLinear(MergedColumnParallelLinear):
    """Two projections of one input, gate and up: x [T, input_size] -> activation(gate) * up [T,
    size / ranks] (Shazeer 2020)."""

    seams = frozenset()

    def __init__(
        self,
        input_size: int,
        size: int,
        *,
        activation: str,
        bias: bool = False,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        """`activation` is a name that `get_activation` accepts."""
        super().__init__(
            input_size, [size, size], bias=bias, vllm_config=vllm_config, prefix=prefix
        )
        get_activation(activation)
        self.activation = activation
        self.epilogue = Epilogue(activation, gated=True)

    def forward(self, x: Tensor, rows: Rows | Tensor | None = None) -> Tensor:
        return self.method.apply(
            x, self.bias, self.epilogue, rows=self.rows if rows is None else rows
        )


class QKVParallelLinear(_Linear):
    """The projections to queries, keys and values, split by heads: x [T, hidden_size] -> [T, q_size
    + 2 * kv_size].

    `num_heads`, `num_kv_heads`, `q_size` and `kv_size` are this rank's. If there are fewer KV heads
    than ranks, ranks share them.
    """

    seams = frozenset()

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        parallel = vllm_config.parallel
        heads = Shard.even(num_heads, parallel, f"attention heads of {prefix}")
        kv_heads = _kv_heads(num_kv_heads, parallel, prefix)
        q, kv = (
            Shard(p.full * head_size, p.start * head_size, p.size * head_size)
            for p in (heads, kv_heads)
        )
        super().__init__(
            hidden_size, [q, kv, kv], bias=bias, vllm_config=vllm_config, prefix=prefix
        )
        self.num_heads = heads.size
        self.num_kv_heads = kv_heads.size
        self.q_size = q.size
        self.kv_size = kv.size


def _kv_heads(num_kv_heads: int, parallel: ParallelConfig, prefix: str) -> Shard:
    ranks = parallel.tensor_parallel_size
    if num_kv_heads >= ranks:
        return Shard.even(num_kv_heads, parallel, f"KV heads of {prefix}")
    if ranks % num_kv_heads:
        raise ConfigError(
            f"KV heads of {prefix}: {num_kv_heads} cannot be shared evenly by "
            f"tensor_parallel_size={ranks}."
        )
    return Shard(num_kv_heads, parallel.tensor_parallel_rank // (ranks // num_kv_heads), 1)


class RowParallelLinear(LinearBase):
    """Split by its inputs; the ranks' results are summed: x [T, input_size / ranks] -> [T,
    output_size]."""

    seams = frozenset()

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = False,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        inputs = Shard.even(input_size, vllm_config.parallel, f"inputs of {prefix}")
        dtype = torch_dtype(vllm_config.model.dtype)
        super().__init__(
            LinearSpec(
                kind="linear",
                prefix=prefix,
                inputs=inputs,
                outputs=(Shard.whole(output_size),),
                dtype=dtype,
            ),
            bias=bias,
        )
        self.parallel = vllm_config.parallel
        self.is_sharded = self.parallel.tensor_parallel_size > 1
        self.is_first = self.parallel.tensor_parallel_rank == 0

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """`residual` [T, output_size], the same on all ranks, is added to the sum."""
        # One rank adds the bias and the residual, so that the sum holds each once.
        adds_residual = self.is_first and residual is not None
        out = self.method.apply(
            x,
            self.bias if self.is_first else None,
            Epilogue(residual=residual) if adds_residual else NO_EPILOGUE,
            rows=self.rows,
        )
        return tensor_parallel_group(self.parallel).all_reduce(out) if self.is_sharded else out


def see_encoder_tokens(module: nn.Module) -> None:
    """Marks the rows of a module's linear layers as an encoder's tokens, `Rows.ENCODER`."""
    for layer in module.modules():
        if isinstance(layer, LinearBase):
            layer.rows = Rows.ENCODER


class HeadLinear(nn.Linear):
    """A head's projection, in float32, unsharded and never quantized: x [R, inputs] -> x W^T + b
    [R, outputs]."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool = True) -> None:
        super().__init__(input_size, output_size, bias=bias, dtype=torch.float32)
        self.kernels = choose_kernels()

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)
