"""Splitting: a captured graph becomes parts between ops that stay eager. Equal parts are compiled
once."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from msgspec import Struct, field
from toolkit_lm.config import OPAQUE_OPS
from toolkit_lm.errors import ConfigError, UnsupportedError
from torch import fx
from torch.fx.passes.split_module import split_module

from toolkit_lm_compile.capture import Capture

_getitem = operator.getitem


class Step(Struct, frozen=True, array_like=True):
    """One call of a plan. Registers hold the inputs and the outputs of earlier steps."""

    kind: str
    """Kind of the call: "part" or "op"."""
    name: str
    """The part's key, or the op's name, such as "toolkit_lm::attention"."""
    inputs: list[list[Any]]
    """Operands, such as [["register", 3], ["value", "model.layers.0.self_attn.attn"]]."""
    outputs: list[int]
    """Output registers. -1: the output is unused."""
    last: list[int] = field(default_factory=list)
    """Registers that no later step reads."""


class ForwardPlan(Struct, frozen=True):
    """A forward pass as data. A warm start needs nothing else to know how it is computed."""

    arguments: dict[str, list[Any]]
    """Dtype and number of dimensions of each argument, by name. Passes with other arguments have
    other plans."""
    inputs: list[list[Any]]
    """Contents of the first registers: see Capture.inputs."""
    num_registers: int
    steps: list[Step]
    result: int
    """The register of the result."""

    @property
    def parts(self) -> list[str]:
        """The keys of the parts, in the order in which they run."""
        return [step.name for step in self.steps if step.kind == "part"]


@dataclass(frozen=True)
class Split:
    """A plan, its graphs by key, and all of the code in readable form."""

    plan: ForwardPlan
    graphs: dict[str, fx.GraphModule]
    code: str


def split(
    captured: Capture, arguments: dict[str, list[Any]], splitting_ops: Sequence[str]
) -> Split:
    """Splits a graph before and after each of `splitting_ops`. Raises ConfigError for an unknown
    op."""
    ops = {op: name for name in splitting_ops if (op := _op(name)) is not None}
    whole = captured.graph
    places: dict[fx.Node, int] = {}
    place = 0
    for node in whole.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":
            raise UnsupportedError(f"the graph has a constant of its own, {node.target}.")
        if node.op == "call_function" and _packet(node.target) in ops:
            places[node] = place + 1
            place += 2
        elif node.target is _getitem and not isinstance(
            node.args[0].meta.get("example_value"), torch.Tensor
        ):
            # An item of a tuple is placed with the op that makes the tuple.
            places[node] = places.get(node.args[0], place)
        else:
            places[node] = place
    cut = split_module(whole, whole, lambda node: places[node], keep_original_order=True)
    graphs: dict[str, fx.GraphModule] = {}
    plan = _plan(cut, ops, captured, arguments, graphs)
    return Split(plan, graphs, f"{whole.code}\n\n# The same in parts\n{cut.code}")


def _plan(
    cut: fx.GraphModule,
    ops: dict[Any, str],
    captured: Capture,
    arguments: dict[str, list[Any]],
    graphs: dict[str, fx.GraphModule],
) -> ForwardPlan:
    registers: dict[fx.Node, int] = {}
    tuples: dict[fx.Node, dict[int, int]] = {}
    """Output registers by index, for steps with several outputs."""
    steps: list[Step] = []
    result = 0
    total = 0
    for node in cut.graph.nodes:
        if node.op == "placeholder":
            registers[node] = total
            total += 1
        elif node.op == "call_module":
            graph = cut.get_submodule(str(node.target))
            assert isinstance(graph, fx.GraphModule)
            inputs = [["register", registers[argument]] for argument in node.args]
            (output,) = graph.graph.find_nodes(op="output")
            results = output.args[0]
            op = _splitting_op(graph, ops)
            if op is not None:
                if op.kwargs or results:
                    raise UnsupportedError(
                        "a splitting op must write to its arguments and return nothing, unlike "
                        f"{op.target}."
                    )
                bound = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True))
                operands = [_operand(argument, bound) for argument in _spread(op.args)]
                steps.append(Step("op", ops[_packet(op.target)], operands, []))
                continue
            several = isinstance(results, tuple | list)
            outputs = list(range(total, total + (len(results) if several else 1)))
            total += len(outputs)
            if several:
                tuples[node] = dict(enumerate(outputs))
            else:
                registers[node] = outputs[0]
            key = signature(graph)
            graphs.setdefault(key, graph)
            steps.append(Step("part", key, inputs, outputs))
        elif node.target is _getitem:
            registers[node] = tuples[node.args[0]][node.args[1]]
        elif node.op == "output":
            (only,) = node.args[0]
            result = registers[only]
        else:
            raise UnsupportedError(f"the graph computes {node.target} outside of its parts.")
    return ForwardPlan(
        arguments,
        [[kind, value] for kind, value in captured.inputs],
        total,
        _with_last_uses(steps, result),
        result,
    )


def _splitting_op(graph: fx.GraphModule, ops: Container[Any]) -> fx.Node | None:
    """The splitting op that a subgraph consists of. None: it holds other ops."""
    found: list[fx.Node] = [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and _packet(node.target) in ops
    ]
    return found[0] if found else None


def _with_last_uses(steps: list[Step], result: int) -> list[Step]:
    seen = {result}
    made = []
    for step in reversed(steps):
        used = {value for kind, value in step.inputs if kind == "register"} | set(step.outputs)
        made.append(Step(step.kind, step.name, step.inputs, step.outputs, sorted(used - seen)))
        seen |= used
    return made[::-1]


def _spread(args: tuple[Any, ...]) -> list[Any]:
    """Flattens operands: the last one may be a list of tensors."""
    *first, last = args
    return [*first, *last] if isinstance(last, list | tuple) else [*first, last]


def _operand(value: Any, bound: dict[fx.Node, list[Any]]) -> list[Any]:
    if isinstance(value, fx.Node):
        return bound[value]
    if value is not None and not isinstance(value, str | int | float | bool):
        raise UnsupportedError(f"a splitting op takes {value!r}, which no manifest can hold.")
    return ["value", value]


def signature(graph: fx.GraphModule) -> str:
    """The key of a graph. Graphs with the same computation on similar tensors have the same key.

    Names do not count, but the order of operations does.
    """
    nodes: dict[fx.Node, str] = {}
    symbols: dict[str, str] = {}
    lines = []
    for node in graph.graph.nodes:
        nodes[node] = f"%{len(nodes)}"
        looks = _looks(node.meta.get("example_value"), symbols) if node.op == "placeholder" else ""
        arguments = fx.map_arg((node.args, node.kwargs), lambda node: _Name(nodes[node]))
        lines.append(
            f"{nodes[node]} {node.op} {'' if node.op == 'placeholder' else _target(node)} "
            f"{arguments!r} {looks}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:20]


class _Name(str):
    __slots__ = ()

    __repr__ = str.__str__


def _looks(value: Any, symbols: dict[str, str]) -> str:
    if isinstance(value, torch.Tensor):
        shape, strides = (
            [_size(size, symbols) for size in sizes] for sizes in (value.shape, value.stride())
        )
        return (
            f"{value.dtype} {value.device} {shape} {strides} "
            f"{_size(value.storage_offset(), symbols)}"
        )
    return _size(value, symbols)


def _size(size: Any, symbols: dict[str, str]) -> str:
    if not isinstance(size, torch.SymInt):
        return str(size)
    expression = size.node.expr
    for symbol in sorted(expression.free_symbols, key=str):
        symbols.setdefault(str(symbol), f"T{len(symbols)}")
    return str(
        expression.subs(
            {symbol: symbols[str(symbol)] for symbol in expression.free_symbols}, simultaneous=True
        )
    )


def _target(node: fx.Node) -> str:
    target = node.target
    return (
        target
        if isinstance(target, str)
        else f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"
    )


def _op(name: str) -> Any:
    """The op of a name. None: only models of another kind have it. Raises ConfigError for an
    unknown name."""
    try:
        space, op = name.split("::")
        return getattr(getattr(torch.ops, space), op)
    except (ValueError, AttributeError):
        if name in OPAQUE_OPS:
            return None
        ops = ", ".join(map(repr, OPAQUE_OPS))
        raise ConfigError(
            f"option 'compilation_config': splitting_ops: there is no op {name!r}. Ops are {ops}."
        ) from None


def _packet(target: Any) -> Any:
    return getattr(target, "overloadpacket", target)
