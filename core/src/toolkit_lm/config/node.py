"""NodeConfig: which of several machines this one is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from toolkit_lm.config.options import option


class NodeConfig(Struct, frozen=True, kw_only=True):
    """Which of several machines this one is, and where they meet. TOOLKIT_LM_LAUNCH_KEY may hold
    the key itself."""

    node_rank: Annotated[int, option("Number of this machine. 0 holds the engine.", ge=0)] = 0
    master: Annotated[
        str | None, option("HOST:PORT of node 0, where the other nodes reach it.", none="none")
    ] = None
    launch_key_file: Annotated[
        str | None,
        option(
            "File of a secret, the same on all nodes: they prove that they know it.",
            none="TOOLKIT_LM_LAUNCH_KEY",
        ),
    ] = None
    node_timeout: Annotated[
        float,
        option(
            "Seconds without a sign of life after which another machine counts as lost.",
            ge=2.0,
            le=3600.0,
        ),
    ] = 15.0
