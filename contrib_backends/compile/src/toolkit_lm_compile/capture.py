"""Capture: one forward pass of a model as one graph, with symbols for its numbers of tokens."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch._dynamo as dynamo
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import Model
from torch import Tensor, fx
from torch.fx.experimental import _config as symbolic_config

from toolkit_lm_compile.collectives import traced

_numbers = count()
_FILE = re.compile(r'File "([^"\n]+)", line (\d+)')


@dataclass(frozen=True)
class Capture:
    """A traced forward pass. Its graph takes `inputs` in this order, and returns the model's
    result."""

    graph: fx.GraphModule
    inputs: list[tuple[str, Any]]
    """Inputs of the graph: ("argument", name), ("tensor", its path in the model) or ("symbol",
    (argument, dimension))."""
    files: list[str]
    """Source files that were traced."""


def capture(model: Model, arguments: Mapping[str, Tensor], dynamic: Mapping[str, int]) -> Capture:
    """Traces `model(**arguments)` as one graph. `dynamic`: the dimension of each argument that is
    symbolic.

    Raises UnsupportedError, with the line, if the trace breaks or the code depends on the number of
    tokens.
    """
    return traced(model.vllm_config.parallel, lambda: _capture(model, arguments, dynamic))


def _capture(model: Model, arguments: Mapping[str, Tensor], dynamic: Mapping[str, int]) -> Capture:
    names = list(arguments)
    found = list[fx.GraphModule]()
    inputs: list[tuple[str, Any]] = []

    def record(graph: fx.GraphModule, examples: list[Any]) -> Callable[..., list[Tensor]]:
        found.append(graph)
        inputs.extend(_inputs(graph, names))
        (output,) = graph.graph.find_nodes(op="output")
        results = [node.meta["example_value"] for node in output.args[0]]
        return lambda *_: [
            torch.empty(
                [_hint(size) for size in tensor.shape], dtype=tensor.dtype, device=tensor.device
            )
            for tensor in results
        ]

    for name, dimension in dynamic.items():
        dynamo.mark_dynamic(arguments[name], dimension)
    settings: Any = symbolic_config
    try:
        # Without the patch, code for one token would be code of its own.
        with torch.inference_mode(), settings.patch(backed_size_oblivious=True):
            out = torch.compile(_fresh(model, names), fullgraph=True, backend=record)(
                *arguments.values()
            )
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"the forward pass of {type(model).__name__} is not one graph: {_reason_of(error)}"
        ) from error
    if not isinstance(out, Tensor) or len(found) != 1:
        raise UnsupportedError(
            f"the forward pass of {type(model).__name__} does not give one tensor."
        )
    [graph] = found
    _check_guards(graph, model)
    traces = (node.meta.get("stack_trace") or "" for node in graph.graph.nodes)
    files = sorted({file for trace in traces for file, _ in _FILE.findall(trace)})
    return Capture(graph, inputs, files)


def resolve(model: Model, path: list[list[Any]]) -> Any:
    """The object at a path in the model, such as [["attr", "layers"], ["item", 0]]."""
    found: Any = model
    for kind, key in path:
        found = getattr(found, key) if kind == "attr" else found[key]
    return found


def _fresh(model: Model, names: list[str]) -> Callable[..., Any]:
    """Wraps the model in a function with its own code object, so that torch has no cached traces of
    it."""

    def forward(*tensors: Tensor) -> Any:
        return model(**dict(zip(names, tensors, strict=True)))

    code = forward.__code__.replace(co_name=f"forward_{next(_numbers)}")
    return types.FunctionType(code, forward.__globals__, code.co_name, None, forward.__closure__)


def _inputs(graph: fx.GraphModule, names: list[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    symbols: dict[Any, tuple[str, int]] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node in placeholders:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            continue
        path = _path(node)
        if path[0] == ["root", "tensors"]:
            name = names[path[1][1]]
            node.meta["argument"] = name
            symbols |= {
                size.node.expr: (name, place)
                for place, size in enumerate(value.shape)
                if isinstance(size, torch.SymInt)
            }
    for node in placeholders:
        value = node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            if value.node.expr not in symbols:
                raise UnsupportedError(
                    f"the graph takes a number {value}, which is none of its arguments' sizes."
                )
            found.append(("symbol", symbols[value.node.expr]))
        elif "argument" in node.meta:
            found.append(("argument", node.meta["argument"]))
        else:
            found.append(("tensor", _path(node)[1:]))
    return found


def _path(node: fx.Node) -> list[list[Any]]:
    """The path where torch found an input, such as [["root", "model"], ["attr", "layers"], ["item",
    0]]."""
    source = node.meta["grapharg"].source
    name: str = source.name() if callable(source.name) else source.name
    path: list[list[Any]] = []
    at: ast.expr = ast.parse(name, mode="eval").body
    while True:
        match at:
            case ast.Attribute(value=inner, attr=key):
                path.append(["attr", key])
            case ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(key))):
                if key in ("model", "tensors"):
                    path.append(["root", key])
                    return path[::-1]
                break
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                path.append(["item", key])
            case _:
                break
        at = inner
    raise UnsupportedError(
        f"the graph reads a tensor that is neither an argument nor the model's: {name}."
    )


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _check_guards(graph: fx.GraphModule, model: Model) -> None:
    """Raises UnsupportedError if the graph holds only for some numbers of tokens.

    Steps do not check guards, so the only ones allowed are those that equal symbols give.
    """
    values = (node.meta.get("example_value") for node in graph.graph.nodes)
    mode = next(
        (
            value.fake_mode
            for value in values
            if isinstance(value, Tensor) and hasattr(value, "fake_mode")
        ),
        None,
    )
    if mode is None or mode.shape_env is None:
        return
    for guard in mode.shape_env.guards:
        expression = guard.expr
        if not _holds_for_equal_symbols(expression):
            where = (
                "".join(
                    guard.sloc.user.format() if getattr(guard.sloc, "user", None) else []
                ).strip()
                if hasattr(guard, "sloc")
                else ""
            )
            raise UnsupportedError(
                (
                    f"the forward pass of {type(model).__name__} holds only where {expression} "
                    f"(its numbers of tokens). {where}"
                ).rstrip()
            )


def _holds_for_equal_symbols(expression: Any) -> bool:
    """Whether a guard is an equality, such as of 192 * s0 and 192 * s1, that holds wherever all of
    its symbols are the same number."""
    if expression.func.__name__ != "Equality" or not expression.free_symbols:
        return False
    same = dict.fromkeys(expression.free_symbols, min(expression.free_symbols, key=str))
    left, right = (side.subs(same) for side in expression.args)
    return bool(left == right)


def _reason_of(error: Exception) -> str:
    """The reason and the line of code, extracted from torch's long error."""
    text = str(error)
    lines = _FILE.findall(text.split("from user code", 1)[-1]) or _FILE.findall(text)
    here = [(file, line) for file, line in lines if "/torch/" not in file] or lines
    where = f" At {here[-1][0]}:{here[-1][1]}." if here else ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    explained = re.search(r"Explanation: (.+)", text)
    return f"{first.rstrip('.')}{': ' + explained[1].rstrip('.') if explained else ''}.{where}"


def module_files(files: list[str]) -> dict[str, str]:
    """The files among `files` that belong to imported modules, by the module's name."""
    names = {
        getattr(module, "__file__", None): name
        for name, module in list(sys.modules.items())
        if module is not None
    }
    return {names[file]: file for file in files if file in names}
