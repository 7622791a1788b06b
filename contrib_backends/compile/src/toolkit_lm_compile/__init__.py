"""Compiled forward passes: torch traces a model once, Inductor compiles its parts, and a cache
keeps them for later starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.plugin import CompilerRegistry, hookimpl

if TYPE_CHECKING:
    from toolkit_lm_commands import CommandRegistry


@hookimpl
def toolkit_register_compilers(compilers: CompilerRegistry) -> None:
    compilers.add(
        "inductor",
        "toolkit_lm_compile.compiler:InductorCompiler",
        counter="toolkit_lm_compile.counter:num_compiled",
    )


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "compile",
        "toolkit_lm_compile.cli:compile_model",
        help="Compile a model, so that later starts find it in the cache.",
    )
    commands.add(
        "cache list",
        "toolkit_lm_compile.cli:list_entries",
        help="List what the compile cache holds.",
    )
    commands.add(
        "cache show", "toolkit_lm_compile.cli:show", help="Show one entry of the compile cache."
    )
    commands.add(
        "cache prune", "toolkit_lm_compile.cli:prune", help="Delete entries of the compile cache."
    )
    commands.add(
        "cache export",
        "toolkit_lm_compile.cli:export",
        help="Write an entry of the compile cache to an archive.",
    )
    commands.add(
        "cache import",
        "toolkit_lm_compile.cli:import_",
        help="Take an archive into the compile cache.",
    )
