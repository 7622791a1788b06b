"""Linear layers that hold one rank's shard. Weights are [output, input], as in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from toolkit_lm.config import ParallelConfig, VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import ConfigError
from toolkit_lm.model.activation import get_activation
from toolkit_lm.model.parameters import Part, ShardLoader, new_parameter, torch_dtype
from toolkit_lm.model.projection import Projection


class _Linear(Projection):
    """y = x W^T + b with this rank's rows of W: `outputs`, one after the other."""

    def __init__(self, input_size: int, outputs: Sequence[Part], *, bias: bool, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.input_size = input_size
        self.output_size = sum(part.size for part in outputs)
        self.outputs = tuple(outputs)
        dtype = torch_dtype(vllm_config.model.dtype)
        loader = ShardLoader(self.outputs)
        self.weight = new_parameter((self.output_size, input_size), dtype, loader)
        self.bias = new_parameter((self.output_size,), dtype, loader) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self.bias)

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}"


class ReplicatedLinear(_Linear):
    """Every rank holds the whole weight: x [T, input_size] -> [T, output_size]."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(input_size, [Part.whole(output_size)], bias=bias, vllm_config=vllm_config, prefix=prefix)


class MergedColumnParallelLinear(_Linear):
    """Several projections of one input, each split by its outputs: x [T, input_size] -> [T, sum(output_sizes) / ranks].

    A rank's output is its share of the first projection, then of the second, and so on.
    """

    def __init__(self, input_size: int, output_sizes: Sequence[int], *, bias: bool = False, vllm_config: VllmConfig, prefix: str) -> None:
        outputs = [Part.even(size, vllm_config.parallel, f"outputs of {prefix}") for size in output_sizes]
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
        super().__init__(input_size, [output_size], bias=bias, vllm_config=vllm_config, prefix=prefix)
        if activation is not None:
            get_activation(activation)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self.bias, activation=self.activation)


class QKVParallelLinear(_Linear):
    """The projections to queries, keys and values, split by heads: x [T, hidden_size] -> [T, q_size + 2 * kv_size].

    `num_heads`, `num_kv_heads`, `q_size` and `kv_size` are this rank's. Ranks share a KV head where there are fewer of them than ranks.
    """

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
        heads = Part.even(num_heads, parallel, f"attention heads of {prefix}")
        kv_heads = _kv_heads(num_kv_heads, parallel, prefix)
        self.num_heads, self.num_kv_heads = heads.size, kv_heads.size
        self.q_size, self.kv_size = heads.size * head_size, kv_heads.size * head_size
        q, kv = (Part(p.full * head_size, p.start * head_size, p.size * head_size) for p in (heads, kv_heads))
        super().__init__(hidden_size, [q, kv, kv], bias=bias, vllm_config=vllm_config, prefix=prefix)


def _kv_heads(num_kv_heads: int, parallel: ParallelConfig, prefix: str) -> Part:
    ranks = parallel.tensor_parallel_size
    if num_kv_heads >= ranks:
        return Part.even(num_kv_heads, parallel, f"KV heads of {prefix}")
    if ranks % num_kv_heads:
        raise ConfigError(f"KV heads of {prefix}: {num_kv_heads} cannot be shared evenly by tensor_parallel_size={ranks}.")
    return Part(num_kv_heads, parallel.tensor_parallel_rank // (ranks // num_kv_heads), 1)


class RowParallelLinear(Projection):
    """Split by its inputs; the ranks' results are summed: x [T, input_size / ranks] -> [T, output_size]."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.parallel = vllm_config.parallel
        self.is_sharded = self.parallel.tensor_parallel_size > 1
        inputs = Part.even(input_size, self.parallel, f"inputs of {prefix}")
        self.input_size, self.output_size = inputs.size, output_size
        dtype = torch_dtype(vllm_config.model.dtype)
        self.weight = new_parameter((output_size, inputs.size), dtype, ShardLoader((inputs,), dim=1))
        self.bias = new_parameter((output_size,), dtype, ShardLoader((Part.whole(output_size),))) if bias else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` [T, output_size], the same on all ranks, is added to the sum."""
        if not self.is_sharded:
            return self.project(x, self.bias, residual=residual)
        # One rank adds them, so that the sum holds them once.
        first = self.parallel.tensor_parallel_rank == 0
        out = self.project(x, self.bias if first else None, residual=residual if first else None)
        return tensor_parallel_group(self.parallel).all_reduce(out)

    def extra_repr(self) -> str:
        return f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}"
