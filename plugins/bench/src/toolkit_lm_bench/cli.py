"""`toolkit bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, nearest
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import engine_command

from toolkit_lm_bench.startup import STATES, WAYS, Startup, measure

app = typer.Typer(help="Measure an installation.", no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Measure an installation."""


@app.command("startup")
@engine_command()
def startup(
    config: VllmConfig,
    plugins: Plugins,
    runs: Annotated[int, typer.Option(min=1, help="Number of starts of each kind. The median is shown.")] = 3,
    ways: Annotated[
        str, typer.Option(metavar="NAME,...", help="Ways to start. offline: LLM in a process of its own. server: toolkit serve.")
    ] = "offline,server",
    states: Annotated[
        str,
        typer.Option(
            metavar="NAME,...", help="States of the machine. cold: no file in memory, no bytecode. warm: right after another start."
        ),
    ] = "cold,warm",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the time from the start of a process to its first token.

    Cold: the files of the checkpoint and of all installed packages are dropped from the page cache, unless a process has them mapped.
    Python finds no bytecode, and compiles each module that it imports. Warm: the same start was made just before.
    """
    found = [
        measure(config, plugins, way, state, runs)
        for way in _names(ways, "ways", tuple(WAYS))
        for state in _names(states, "states", STATES)
    ]
    if json_output:
        typer.echo(json.dumps([asdict(one) for one in found], indent=2))
        return
    for way in dict.fromkeys(one.way for one in found):
        _print([one for one in found if one.way == way], config.model.model)


def _names(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"option {option!r}: {name!r} is not known. {nearest(name, known)}")
    return names


def _print(found: list[Startup], model: str) -> None:
    table = Table("phase", *(one.state for one in found))
    for phase in dict.fromkeys(phase for one in found for phase in one.phases):
        table.add_row(phase, *(f"{one.phases.get(phase, 0.0):.2f}" for one in found))
    table.add_section()
    table.add_row("start to first token", *(f"{one.total:.2f}" for one in found))
    typer.echo(f"{model}, {found[0].way}: seconds, medians of {found[0].runs}")
    Console().print(table)
