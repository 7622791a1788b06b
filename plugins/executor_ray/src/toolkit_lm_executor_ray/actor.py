"""Ray actor that runs on a machine."""

from __future__ import annotations

import os

from toolkit_lm.errors import ToolkitError
from toolkit_lm_executor_mp.network import Master
from toolkit_lm_executor_mp.node import Node


class NodeActor:
    """A node: it starts its ranks, and passes on what the engine and they say to each other."""

    def run(
        self,
        node: int,
        host: str,
        port: int,
        key: bytes,
        timeouts: tuple[float, float],
        num_threads: int,
    ) -> str:
        """Until the engine has ended. Returns what has failed, "" where nothing has.

        `host`, `port`: where the engine is reached. `key`: of the launch, 32 bytes. `timeouts`:
        Node's, in seconds, of the start and of silence. `num_threads`: of all ranks together.
        """
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        try:
            Node(node, Master(host, port), key, *timeouts).run()
        except (ToolkitError, OSError) as error:
            return str(error)
        return ""
