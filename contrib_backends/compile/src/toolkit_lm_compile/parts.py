"""Parts: a graph becomes compiled code, which lies in a folder of its own and can be loaded from
there."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from toolkit_lm.errors import ConfigError
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._inductor import cpu_vec_isa, standalone_compile
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch._inductor.standalone_compile import CacheCompiledArtifact
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from toolkit_lm_compile.options import Band

Compiled = Callable[..., Any]

SETTINGS: dict[str, Any] = {
    # Generated code must not depend on the number of threads at the time.
    "cpp.dynamic_threads": True,
    "compile_threads": 1,
    # Each process would run g++ to see whether a header has changed.
    "cpp_cache_precompile_headers": False,
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
}


ANY = Band(1, 2**15)
"""Any number of tokens. A larger step is not computed by compiled code: its indices need not fit
into 32 bits."""


def compile_part(
    graph: fx.GraphModule, folder: Path, band: Band | None, patches: dict[str, Any]
) -> Compiled:
    """Compiles for any number of tokens, or for those of a band. What it wrote stays in `folder`.

    Raises NarrowError where the code does not hold for all of them.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    examples = [node.meta["example_value"] for node in placeholders]
    options: dict[str, Any] = {"dynamic_shapes": "from_graph"}
    shape_env = _shape_env(examples)
    if band is not None:
        shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=shape_env)
        with mode:
            examples = _in_band(examples, band, shape_env)
        options = {"dynamic_shapes": "from_example_inputs", "fake_mode": mode}
    num_before = len(shape_env.guards) if shape_env is not None else 0
    # They are tried out before the folder is another one.
    instructions_here()
    with _settings(folder), torch.inference_mode(False), torch.no_grad():
        compiled: Compiled = standalone_compile(
            graph, examples, options={"config_patches": patches}, **options
        )
    if shape_env is not None:
        _check_holds([guard.expr for guard in shape_env.guards[num_before:]], band or ANY)
    return compiled


def compiles_bands() -> bool:
    """Whether the installed torch compiles for a band: 2.11 cannot be told its bounds."""
    return "fake_mode" in inspect.signature(standalone_compile).parameters


class NarrowError(Exception):
    """Code holds for some of the numbers of tokens only that it is for."""


def _check_holds(guards: Sequence[Any], band: Band) -> None:
    """What torch has assumed of a number of tokens, nobody checks in a step.

    That there are two of them at least is assumed of layouts: in memory, an axis of one lies like
    any other.
    """
    near = range(max(band.first, 2), min(band.last, 130) + 1)
    tried = {
        *near,
        *(
            2**k + one
            for k in range(1, 16)
            for one in (-1, 0, 1)
            if band.first <= 2**k + one <= band.last
        ),
        band.last,
    }
    for guard in guards:
        for size in sorted(tried - {1}):
            # sympy's own truth is no bool.
            if guard.subs(dict.fromkeys(guard.free_symbols, size)) == False:  # noqa: E712
                raise NarrowError(f"{guard}, which {size} tokens are not")


def _shape_env(examples: Sequence[Any]) -> ShapeEnv | None:
    """That of the symbols; None: there is none."""
    sizes = (
        size
        for one in examples
        for size in (one.shape if isinstance(one, torch.Tensor) else (one,))
    )
    found: ShapeEnv | None = next(
        (size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None
    )
    return found


def is_kept(folder: Path) -> bool:
    """Whether a compilation left in its folder what `load_part` needs."""
    found = folder / "aotautograd"
    return found.is_dir() and len(list(found.iterdir())) == 1


def load_part(folder: Path, instructions: list[str], patches: dict[str, Any]) -> Compiled:
    """What `compile_part` left in a folder. No compiler runs. Raises anything where it is damaged.

    `instructions` are those of the process that compiled; the key says that they are here, too.
    Each process would try them out by g++. `patches` are those of the compilation: code is found by
    the command line of g++, which they may change.
    """
    known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) in instructions]
    with (
        _settings(folder),
        inductor_config.patch(patches),
        patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: known),
    ):
        loaded: Compiled = CacheCompiledArtifact.load(path=str(folder), format="unpacked")
    return loaded


def instructions_here() -> list[str]:
    """Names of the sets of vector instructions that Inductor may use. They are tried out in the
    user's own folder, once."""
    return [str(isa) for isa in cpu_vec_isa.valid_vec_isa_list()]


@contextmanager
def _settings(folder: Path) -> Iterator[None]:
    patched = (
        inductor_config.patch(SETTINGS),
        functorch_config.patch({"enable_autograd_cache": True}),
    )
    with patched[0], patched[1], temporary_cache_dir(str(folder)), warnings.catch_warnings():
        # Those of torch about itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def check_patches(patches: dict[str, Any]) -> None:
    """Raises ConfigError for what is no option of Inductor's."""
    known = inductor_config.get_config_copy()
    for name in patches:
        if name not in known:
            raise ConfigError(
                "option 'compilation_config': inductor_compile_config: torch._inductor.config "
                f"has no option {name!r}."
            )


def symbols_of(graph: fx.GraphModule) -> set[Any]:
    """The symbols in the shapes of a graph's inputs."""
    found: set[Any] = set()
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        found |= {
            symbol
            for size in sizes
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        }
    return found


def _in_band(examples: Sequence[Any], band: Band, shape_env: ShapeEnv) -> list[Any]:
    """The examples, their only symbol being a number of the band."""
    number: Any = band.first
    if band.first < band.last:
        source = ConstantSource("num_tokens")
        limits = StrictMinMaxConstraint(vr=ValueRanges(band.first, band.last), warn_only=False)
        number = shape_env.create_symbol(
            band.last, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=limits
        )

    def known(one: Any) -> Any:
        if not isinstance(one, torch.SymInt):
            return int(one)
        expression = one.node.expr.subs(dict.fromkeys(one.node.expr.free_symbols, number))
        if expression.is_number:
            return int(expression)
        return shape_env.create_symintnode(expression, hint=int(expression.subs(number, band.last)))

    def remade(example: Any) -> Any:
        if not isinstance(example, torch.Tensor):
            return known(example)
        shape = [known(one) for one in example.shape]
        strides = [known(one) for one in example.stride()]
        return torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)

    return [remade(example) for example in examples]
