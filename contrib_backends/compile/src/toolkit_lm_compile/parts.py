"""Parts: subgraphs that become compiled code. Each has its own folder, from which it can be
loaded."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
"""Any number of tokens up to 32768. Larger steps run eagerly, since their indices may not fit into
32 bits."""


def compile_part(
    graph: fx.GraphModule, folder: Path, band: Band | None, patches: dict[str, Any]
) -> Compiled:
    """Compiles a part for any number of tokens, or for those of a band. Its files stay in `folder`.

    Raises NarrowError if the code does not hold for all of them.
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
    """Whether the installed torch can compile for a band. torch 2.11 takes no bounds."""
    return "fake_mode" in inspect.signature(standalone_compile).parameters


class NarrowError(Exception):
    """Compiled code holds only for some of its numbers of tokens."""


def _check_holds(guards: Sequence[Any], band: Band) -> None:
    """Raises NarrowError if a guard fails for a number of tokens in the band: steps do not check
    guards.

    A single token is not tried. torch assumes two or more for layouts only, and an axis of one lies
    in memory like any other.
    """
    near = range(max(band.first, 2), min(band.last, 130) + 1)
    tried = {
        *near,
        *(
            2**k + offset
            for k in range(1, 16)
            for offset in (-1, 0, 1)
            if band.first <= 2**k + offset <= band.last
        ),
        band.last,
    }
    for guard in guards:
        for size in sorted(tried - {1}):
            # sympy's own truth is no bool.
            if guard.subs(dict.fromkeys(guard.free_symbols, size)) == False:  # noqa: E712
                raise NarrowError(f"{guard}, which {size} tokens are not")


def _shape_env(examples: Sequence[Any]) -> ShapeEnv | None:
    """The ShapeEnv of the examples' symbols. None: they have no symbols."""
    sizes = (
        size
        for tensor in examples
        for size in (tensor.shape if isinstance(tensor, torch.Tensor) else (tensor,))
    )
    found: ShapeEnv | None = next(
        (size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None
    )
    return found


def is_kept(folder: Path) -> bool:
    """Whether the folder of a compilation holds what `load_part` needs."""
    found = folder / "aotautograd"
    return found.is_dir() and len(list(found.iterdir())) == 1


def load_part(folder: Path, instructions: dict[str, str], patches: dict[str, Any]) -> Compiled:
    """Loads the code that `compile_part` left in a folder, without a compiler. Raises any error if
    it is damaged.

    `instructions`: vector instructions of the process that compiled, and g++'s flags for them. The
    key ensures that this CPU has them, so that g++ need not test them again; what torch has not
    tested it leaves out of the flags, by which code is found.

    `patches`: Inductor options of the compilation. Code is found by the command line of g++, which
    they may change.
    """
    known = [isa for isa in cpu_vec_isa.supported_vec_isa_list if str(isa) in instructions]
    with (
        _settings(folder),
        inductor_config.patch(patches),
        patch.object(cpu_vec_isa, "valid_vec_isa_list", lambda: known),
        ExitStack() as flags,
    ):
        for isa in known:
            arch = instructions[str(isa)]
            flags.enter_context(patch.object(isa, "build_arch_flags", lambda arch=arch: arch))
        loaded: Compiled = CacheCompiledArtifact.load(path=str(folder), format="unpacked")
    return loaded


def instructions_here() -> dict[str, str]:
    """g++'s flags by name of the vector instruction sets that Inductor may use. g++ tests them
    once, in the user's own folder."""
    return {str(isa): isa.build_arch_flags() for isa in cpu_vec_isa.valid_vec_isa_list()}


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
    """Raises ConfigError for a name that Inductor's config does not have."""
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
    """The examples with their one symbol replaced by a number in the band, or by a symbol bounded
    by it."""
    number: Any = band.first
    if band.first < band.last:
        source = ConstantSource("num_tokens")
        limits = StrictMinMaxConstraint(vr=ValueRanges(band.first, band.last), warn_only=False)
        number = shape_env.create_symbol(
            band.last, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=limits
        )

    def known(size: Any) -> Any:
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, number))
        if expression.is_number:
            return int(expression)
        return shape_env.create_symintnode(expression, hint=int(expression.subs(number, band.last)))

    def remade(example: Any) -> Any:
        if not isinstance(example, torch.Tensor):
            return known(example)
        shape = [known(size) for size in example.shape]
        strides = [known(size) for size in example.stride()]
        return torch.empty_strided(shape, strides, dtype=example.dtype, device=example.device)

    return [remade(example) for example in examples]
