"""The command `toolkit worker`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from toolkit_lm.config import NodeConfig
from toolkit_lm_commands import engine_command

if TYPE_CHECKING:
    from toolkit_lm_executor_mp.wire import Welcome


@engine_command(NodeConfig)
def worker(
    node: NodeConfig,
    timeout: Annotated[
        float,
        typer.Option(
            "--start-timeout",
            min=0.1,
            envvar="TOOLKIT_LM_START_TIMEOUT",
            help="Seconds until node 0 must be there.",
        ),
    ] = 1800.0,
) -> None:
    """Run a machine's share of the ranks of a model that another machine serves, until that ends.

    Node 0 runs `toolkit serve MODEL --nodes N --master HOST:PORT`; each of the others this command,
    with its number. What is served and how, node 0 says. The exit code is 1 where anything has
    failed.
    """
    from toolkit_lm_executor_mp.node import make_node

    def joined(welcome: Welcome) -> None:
        typer.echo(
            f"node {node.node_rank} has joined {node.master}: rank "
            f"{', '.join(map(str, welcome.ranks))}",
            err=True,
        )

    make_node(node, timeout).run(joined)
