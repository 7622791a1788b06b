"""Tensor and pipeline parallel: a process per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.plugin import ExecutorRegistry, hookimpl

if TYPE_CHECKING:
    from toolkit_lm_commands import CommandRegistry


@hookimpl
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    executors.add("mp", "toolkit_lm_executor_mp.executor:MpExecutor", runs_nodes=True)
    executors.add("external_launcher", "toolkit_lm_executor_mp.external:ExternalLauncherExecutor")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "worker",
        "toolkit_lm_executor_mp.cli:worker",
        help="Run ranks of a model that another machine serves.",
    )
