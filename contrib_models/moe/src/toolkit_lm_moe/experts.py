"""Mixtures of experts (Shazeer et al. 2017): which experts a token goes to, and their grouped
product."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from toolkit_lm.attention import op_layer
from toolkit_lm.bypass import Bypassable
from toolkit_lm.config import ParallelConfig, VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import ConfigError
from toolkit_lm.model import (
    GATES,
    NO_EPILOGUE,
    Absent,
    Epilogue,
    GroupedProduct,
    HFConfig,
    LinearBase,
    LinearMethod,
    LinearSpec,
    RoutedProduct,
    Rows,
    Shard,
    UnquantizedMethod,
    choose_kernels,
    get_activation,
    join,
    torch_dtype,
)
from torch import Tensor, nn
from torch.nn import functional as F

_FUSED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
PROJECTIONS = ("gate_up_proj", "down_proj")
_NUMBERS_OF_CHOICES = ("num_experts_per_tok", "top_k_experts")
"""Keys of config.json that state to how many experts a token goes."""
_ALIGNMENT = 16
"""Bytes. The grouped product takes only rows whose length is a multiple of it."""


def route_top_k(logits: Tensor, top_k: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """The router's logits [T, E] -> the `top_k` likeliest experts of each token [T, K] (int64), and
    their weights [T, K] (float32).

    Weights are probabilities over all experts; with `normalize` those of a token's experts sum to
    one.
    """
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if normalize else weights


def split_experts(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Cuts the tensors that hold all experts into one per expert, which is how `RoutedExperts`
    names its weights.

    "a.experts.gate_up_proj" [E, 2 * inner, H] gives "a.experts.0.gate_up_proj.weight" [2 * inner,
    H], and so on; "a.experts.down_proj" [E, H, inner] likewise. Other weights, those that are
    stored per expert too, pass through.
    """
    for name, tensor in weights:
        fused = _FUSED.match(name)
        if fused and tensor.ndim == 3:
            yield from (
                (f"{fused[1]}.{i}.{fused[2]}.weight", expert) for i, expert in enumerate(tensor)
            )
        else:
            yield name, tensor


def divide_experts(num_experts: int, parallel: ParallelConfig, subject: str) -> range:
    """The numbers of the experts that this rank holds with expert parallelism: contiguous, in
    numbers that differ by one at most.

    Raises ConfigError, naming `subject`, where there are fewer experts than ranks.
    """
    rank = parallel.tensor_parallel_rank
    ranks = parallel.tensor_parallel_size
    if num_experts < ranks:
        raise ConfigError(
            f"enable_expert_parallel: the {num_experts} experts of {subject} cannot be divided "
            f"over tensor_parallel_size={ranks}, as each rank holds one at least."
        )
    return range(num_experts * rank // ranks, num_experts * (rank + 1) // ranks)


def _top_k(config: HFConfig) -> int:
    """To how many experts a token goes."""
    return next((k for key in _NUMBERS_OF_CHOICES if (k := config.get(key, int)) is not None), 1)


def _check_activation(name: str, gated: bool) -> None:
    """Raises UnsupportedError for a name that neither `gate` nor `get_activation` accepts."""
    if not (gated and name in GATES):
        get_activation(name)


GatedUnit = Callable[[Tensor], Tensor]
"""Gate and up side by side [rows, 2 * inner] -> [rows, inner]."""


class _GatedLinear(LinearBase):
    """Gate and up of one expert: [rows, H] -> activation(gate) * up [rows, inner], or `unit` of
    both. Without a gate: activation(up)."""

    def __init__(
        self, spec: LinearSpec, activation: str, *, bias: bool, unit: GatedUnit | None
    ) -> None:
        super().__init__(spec, bias=bias)
        gated = len(spec.outputs) > 1
        self.epilogue = NO_EPILOGUE if unit is not None else Epilogue(activation, gated=gated)
        self.unit = unit

    def forward(self, x: Tensor, rows: Rows | Tensor | None = None) -> Tensor:
        out = self.method.apply(
            x, self.bias, self.epilogue, rows=self.rows if rows is None else rows
        )
        return out if self.unit is None else self.unit(out)


class _DownLinear(LinearBase):
    """[rows, inner] -> [rows, H]. Of the ranks that hold a share of it, the first adds the bias."""

    def __init__(self, spec: LinearSpec, *, bias: bool) -> None:
        super().__init__(spec, bias=bias)
        self.adds_bias = spec.inputs.start == 0

    def forward(self, x: Tensor, rows: Rows | Tensor | None = None) -> Tensor:
        bias = self.bias if self.adds_bias else None
        return self.method.apply(x, bias, rows=self.rows if rows is None else rows)


class _Expert(nn.Module):
    """Feed-forward: [rows, H] -> [rows, H], of the `tokens` [rows] (int64) of the flat batch.
    Where an expert is cut, the ranks' results are to be summed."""

    def __init__(self, gate_up_proj: LinearBase, down_proj: LinearBase) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj(x, tokens), tokens)
        return out


class RoutedExperts(Bypassable):
    """Feed-forward experts, of which each token goes to a few.

    Each rank holds a share of every expert's inner dimensions or, with `enable_expert_parallel`,
    some experts whole (`divide_experts`). Either way the ranks' results are summed.

    Weights are named "0.gate_up_proj.weight" [2 * inner, H], "0.down_proj.weight" [H, inner],
    "1.gate_up_proj.weight", ...; with `bias` also "0.gate_up_proj.bias", ... A model whose
    checkpoints may hold all experts in one tensor passes them through `split_experts`. Experts that
    are not `gated` have up alone under the name of both: [inner, H].

    Raises ConfigError when the inner dimensions cannot be split evenly over the ranks, or when
    experts are fewer than ranks that hold them whole.
    """

    seams = frozenset()
    held: range
    """The experts of which this rank has weights."""
    stacked: tuple[Tensor, Tensor] | None
    """The weights of the experts held, for one grouped product: gate and up [E, 2 * inner, H], down
    [E, H, inner]. None: one by one."""
    stacked_biases: tuple[Tensor | None, Tensor | None] | None = None
    """Their biases [E, 2 * inner] and [E, H], those that this rank adds."""
    _products: tuple[GroupedProduct, ...] | None = None
    """The kernels' products of experts, gate and up, and down; empty: one by one. None: not asked
    for yet, as weights must be loaded first."""
    _whole: RoutedProduct | None = None
    """The kernels' product of all that experts compute, if they have one."""
    _methods: tuple[LinearMethod, ...] = ()
    """The methods that they were made of. A method may be wrapped later."""
    _choices: Tensor | None = None
    """Where the experts of a step's tokens are kept, if anything reads them."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner_size: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        unit: GatedUnit | None = None,
        bias: bool = False,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        """`unit` takes the place of activation(gate) * up."""
        super().__init__()
        self.prefix = prefix
        self.kernels = choose_kernels()
        self.unit = unit
        self.gated = gated
        self.has_bias = bias
        self.num_experts = num_experts
        self.top_k = _top_k(HFConfig(vllm_config.hf_config))
        self.parallel = vllm_config.parallel
        self.activation = activation
        _check_activation(activation, gated)
        if self.parallel.enable_expert_parallel:
            self.held = divide_experts(num_experts, self.parallel, prefix)
            inner = Shard.whole(inner_size)
        else:
            self.held = range(num_experts)
            inner = Shard.even(inner_size, self.parallel, f"inner dimensions of {prefix}")
        hidden = Shard.whole(hidden_size)
        dtype = torch_dtype(vllm_config.model.dtype)

        def spec(name: str, inputs: Shard, outputs: tuple[Shard, ...]) -> LinearSpec:
            return LinearSpec(
                kind="experts",
                prefix=join(prefix, name),
                inputs=inputs,
                outputs=outputs,
                dtype=dtype,
            )

        outs = (inner,) * (1 + gated)

        def expert(i: int) -> _Expert:
            gate_up = _GatedLinear(
                spec(f"{i}.gate_up_proj", hidden, outs), activation, bias=bias, unit=unit
            )
            return _Expert(
                gate_up, _DownLinear(spec(f"{i}.down_proj", inner, (hidden,)), bias=bias)
            )

        for i in range(num_experts):
            self.add_module(str(i), expert(i) if i in self.held else Absent())
        row_bytes = (size * dtype.itemsize for size in (hidden_size, inner.size))
        is_aligned = all(size % _ALIGNMENT == 0 for size in row_bytes)
        # torch's grouped product loops on the CPU, slower than one over packed weights.
        on_cpu = torch.get_default_device().type == "cpu"
        self.stacked = None if on_cpu or not is_aligned else self.stack()

    def stack(self) -> tuple[Tensor, Tensor] | None:
        """Makes the weights of the experts slices of two tensors, as in `stacked`, before they are
        loaded, and their biases of two others. None: they are quantized."""
        gate_up, down = (
            [self.get_submodule(f"{i}.{name}") for i in self.held] for name in PROJECTIONS
        )
        if not all(isinstance(layer.method, UnquantizedMethod) for layer in (*gate_up, *down)):
            return None
        if self.has_bias:
            bias = _stack(down, "bias")
            self.stacked_biases = _stack(gate_up, "bias"), bias if down[0].adds_bias else None
        return _stack(gate_up, "weight"), _stack(down, "weight")

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Tokens x [T, H], the experts of each [T, K] (int64) and their weights [T, K] (float32) ->
        [T, H], summed over experts."""
        if torch.compiler.is_compiling():
            # One by one, a loop depends on data; the grouped product is traced in bfloat16 alone.
            summed = torch.empty_like(x)
            torch.ops.toolkit_lm.experts(x, experts, weights, summed, self.prefix)
        else:
            summed = self.compute(x, experts, weights)
        return tensor_parallel_group(self.parallel).all_reduce(summed)

    def record_choices(self, num_tokens: int, device: torch.device) -> Tensor:
        """Has each pass write the experts of its T tokens to the beginning of a buffer
        [num_tokens, K] (int16), which is returned. For routing replay."""
        self._choices = torch.zeros(num_tokens, self.top_k, dtype=torch.int16, device=device)
        return self._choices

    def compute(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Computes `forward` for this rank's share of the inner dimensions or of the experts."""
        if self._choices is not None:
            self._choices[: len(experts)] = experts
        if self.stacked is None and self._products is None:
            self._group()
        if self._whole is not None and self.may_bypass():
            return self._whole(x, experts, weights)
        divided = len(self.held) < self.num_experts
        # Counted from the first that is held: rows of experts held elsewhere come last, and how
        # many they are need not be known.
        counted = (experts - self.held.start) % self.num_experts if divided else experts
        chosen, order = counted.flatten().sort(stable=True)
        tokens = order // experts.shape[1]
        rows = x[tokens]
        # The grouped product calls no expert, and a hook waits for the call of its expert.
        if (self.stacked is None and not self._products) or not self.may_bypass():
            sorted_out = self._one_by_one(rows, chosen, tokens)
        else:
            sorted_out = self._grouped(rows, chosen)
        if divided:
            sorted_out.masked_fill_((chosen >= len(self.held)).unsqueeze(-1), 0)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return (out.view(*experts.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _group(self) -> None:
        """Asks the kernels for grouped products of the methods that the experts have by now."""
        methods = self._projections()
        made = [self.kernels.group(methods[i :: len(PROJECTIONS)]) for i in range(len(PROJECTIONS))]
        self._products = tuple(product for product in made if product is not None)
        if len(self._products) < len(PROJECTIONS):
            self._products = ()
            return
        self._methods = methods
        if self.has_bias and self.held:
            of_gate_up, of_down = (
                torch.stack([self.get_parameter(f"{i}.{name}.bias") for i in self.held])
                for name in PROJECTIONS
            )
            adds = self.get_submodule(f"{self.held[0]}.{PROJECTIONS[1]}").adds_bias
            self.stacked_biases = of_gate_up, of_down if adds else None
        if self.unit is None:
            gate_up, down = (methods[i :: len(PROJECTIONS)] for i in range(len(PROJECTIONS)))
            self._whole = self.kernels.experts(
                gate_up, down, self.stacked_biases or (None, None), self._follows, self.held.start
            )

    def _projections(self) -> tuple[LinearMethod, ...]:
        """The methods of the experts held: of each, gate and up, then down."""
        layers = (self.get_submodule(f"{i}.{name}") for i in self.held for name in PROJECTIONS)
        return tuple(cast(LinearBase, layer).method for layer in layers)

    def _grouped(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """Rows [T * K, H], in the order of the experts `chosen` for them -> as rows; those of
        experts held elsewhere are undefined."""
        ends = torch.searchsorted(
            chosen, torch.arange(len(self.held), device=chosen.device), right=True, out_int32=True
        )
        of_gate_up, of_down = self.stacked_biases or (None, None)
        if self.stacked is None:
            assert self._products
            first, second = self._products
            x = first(rows, ends, of_gate_up, self._follows)
            return second(x if self.unit is None else self.unit(x), ends, of_down, NO_EPILOGUE)
        gate_up, down = self.stacked
        held = chosen.clamp(max=len(self.held) - 1)
        x = F.grouped_mm(rows, gate_up.mT, offs=ends)
        x = x if of_gate_up is None else x.add_(of_gate_up[held])
        x = self._follows.finish(x) if self.unit is None else self.unit(x)
        x = F.grouped_mm(x, down.mT, offs=ends)
        return x if of_down is None else x.add_(of_down[held])

    @property
    def _follows(self) -> Epilogue:
        """The epilogue of gate and up: none where `unit` follows."""
        return NO_EPILOGUE if self.unit else Epilogue(self.activation, gated=self.gated)

    def refuses_bypass(self) -> str | None:
        methods = self._projections()
        if self.stacked is None and self._products:
            if any(now is not then for now, then in zip(methods, self._methods, strict=True)):
                return "a projection has another method than the one that was grouped"
            return super().refuses_bypass()
        for method in methods:
            if not isinstance(method, UnquantizedMethod):
                return f"a projection has the method {type(method).__name__}"
        return super().refuses_bypass()

    def _one_by_one(self, rows: Tensor, chosen: Tensor, tokens: Tensor) -> Tensor:
        """Computes the result of `_grouped` one expert at a time, for the experts that have rows.
        `tokens`: the token of each row."""
        hit, counts = torch.unique_consecutive(chosen, return_counts=True)
        sizes = counts.tolist()
        out = torch.empty_like(rows)
        pieces = (torch.split(whole, sizes) for whole in (rows, tokens, out))
        for expert, its_rows, its_tokens, its_out in zip(hit.tolist(), *pieces, strict=True):
            if expert < len(self.held):
                its_out.copy_(self.get_submodule(str(self.held[expert]))(its_rows, its_tokens))
        return out

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, held={self.held.start}..{self.held.stop - 1}"


def _stack(layers: Sequence[nn.Module], name: str) -> Tensor:
    """Makes a parameter of several layers, of one shape, slices of one tensor."""
    parameters = [layer.get_parameter(name) for layer in layers]
    first = parameters[0]
    stacked = torch.empty(len(parameters), *first.shape, dtype=first.dtype, device=first.device)
    for parameter, own in zip(parameters, stacked, strict=True):
        parameter.data = own
    return stacked


def _experts(x: Tensor, experts: Tensor, weights: Tensor, out: Tensor, layer: str) -> None:
    """Writes what the `RoutedExperts` of that name computes to out [T, H]. The op
    `toolkit_lm::experts`."""
    out.copy_(op_layer(layer).compute(x, experts, weights))


# To a compiler routed experts are one opaque op, as attention is: the model's graph is whole.
_library: Any = torch.library.Library("toolkit_lm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "experts(Tensor x, Tensor experts, Tensor weights, Tensor(a!) out, str layer) -> ()"
)
_library.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "toolkit_lm::experts", lambda x, experts, weights, out, layer: None, lib=_library
)
