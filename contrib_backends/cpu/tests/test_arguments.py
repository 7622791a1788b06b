"""Python's tuples and keyword arguments are those that the kernels read."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from toolkit_lm_cpu import arguments, library
from toolkit_lm_cpu.arguments import TUPLES, Layer, check_fields
from toolkit_lm_cpu.library import KERNELS, PAIRS

STUB = Path(library.__file__).with_name("_kernels.pyi")
TREE = ast.parse(STUB.read_text()).body
FIELDS = {node.name: node for node in TREE if isinstance(node, ast.ClassDef)}
"""The arguments that several functions have, by the name of their TypedDict."""
CALLS = [
    node
    for node in TREE
    if isinstance(node, ast.FunctionDef) and (node.args.kwonlyargs or node.args.kwarg)
]
needs_kernels = pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))


@needs_kernels
def test_every_tuple_has_the_fields_of_its_struct() -> None:
    fields = library._kernels.FIELDS
    assert fields == {tuple_.__name__: tuple_._fields for tuple_ in TUPLES}
    defined = {
        name
        for name, value in inspect.getmembers(arguments, inspect.isclass)
        if value.__module__ == arguments.__name__
    }
    assert defined == set(fields)


@pytest.mark.parametrize("name", [tuple_.__name__ for tuple_ in TUPLES])
def test_a_swapped_pair_is_refused(name) -> None:
    theirs: dict[str, tuple[str, ...]] = {tuple_.__name__: tuple_._fields for tuple_ in TUPLES}
    check_fields(theirs)
    first, second, *others = theirs[name]
    for wrong in ((second, first, *others), theirs[name][:-1]):
        with pytest.raises(ImportError, match=f"compiled from other sources: {name} has"):
            check_fields(theirs | {name: wrong})
    del theirs[name]
    with pytest.raises(ImportError, match=f"{name} has the fields None in C"):
        check_fields(theirs)


def names_of(function: ast.FunctionDef) -> list[str]:
    """The keyword arguments of a function of the stub, in order."""
    if function.args.kwarg is None:
        return [argument.arg for argument in function.args.kwonlyargs]
    assert isinstance(function.args.kwarg.annotation, ast.Subscript)
    return fields_of(FIELDS[ast.unparse(function.args.kwarg.annotation.slice)])


def fields_of(shared: ast.ClassDef) -> list[str]:
    bases = [FIELDS[base] for base in map(ast.unparse, shared.bases) if base in FIELDS]
    own = [ast.unparse(node.target) for node in shared.body if isinstance(node, ast.AnnAssign)]
    return [name for base in bases for name in fields_of(base)] + own


@needs_kernels
@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.name)
def test_a_call_names_its_arguments_in_order(function) -> None:
    """Arguments must come in the stub's order. No kernel runs, since a text is not an address."""
    call: Any = getattr(library._kernels, function.name)
    first = [0] * len(function.args.posonlyargs)
    names = names_of(function)
    with pytest.raises(TypeError, match="integer"):
        call(*first, **dict.fromkeys(names, "x"))
    swapped = [names[1], names[0], *names[2:]]
    for wrong in (swapped, names[1:], [], [names[0], "other", *names[2:]]):
        with pytest.raises(TypeError, match=r"keyword argument \d+ is \w+, not \w+"):
            call(*first, **dict.fromkeys(wrong, 0))
    with pytest.raises(TypeError, match=f"keyword argument {len(names) + 1} is more, not of this"):
        call(*first, **dict.fromkeys([*names, "more"], 0))
    with pytest.raises(TypeError, match="arguments without a name"):
        call(*first, 0, **dict.fromkeys(names, 0))


@needs_kernels
@pytest.mark.parametrize("number", [-1, 8])
def test_a_number_of_no_kernel_is_an_error(number) -> None:
    assert len(library._kernels.KERNELS) == 8
    with pytest.raises(ValueError, match=f"no kernel has number {number}"):
        library._kernels.pack(number, weight=0, to=0, outputs=0, inputs=0)


@needs_kernels
@pytest.mark.parametrize("given", [(), (0,) * len(Layer._fields), [0] * len(Layer._fields)])
def test_what_is_no_layer_is_an_error(given) -> None:
    with pytest.raises(TypeError, match=r"a tuple (Layer|NormPart) is needed"):
        library._kernels.layer(given)


@needs_kernels
def test_every_number_is_exported_once() -> None:
    numbers = [number for kernels in KERNELS.values() for number in kernels.values()]
    assert numbers == list(range(len(library._kernels.KERNELS)))
    assert PAIRS == {"float32": 1, "float16": 1, "bfloat16": 2}
