"""Ranks: how many share an engine, and which of several machines this one is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from toolkit_lm.config.options import option


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """Ranks. tensor x pipeline parallel size = number of workers of an engine, one per device."""

    tensor_parallel_size: Annotated[
        int, option("Tensor-parallel ranks, which share each layer.", ge=1)
    ] = 1
    pipeline_parallel_size: Annotated[
        int, option("Pipeline-parallel ranks, each with a part of the layers.", ge=1)
    ] = 1
    enable_expert_parallel: Annotated[
        bool,
        option(
            "Expert parallelism: divide the experts of a layer over the tensor-parallel ranks, "
            "instead of cutting each one."
        ),
    ] = False
    data_parallel_size: Annotated[
        int,
        option("Engines with a copy of the model each, which share the requests.", ge=1, le=1024),
    ] = 1
    nodes: Annotated[
        int,
        option(
            "Machines that share the ranks. All but the first run `toolkit worker`.", ge=1, le=1024
        ),
    ] = 1
    executor: Annotated[
        str,
        option(
            "Executor, by name: how the engine reaches its workers. auto: the first that runs so "
            "many."
        ),
    ] = "auto"
    rank: int = 0
    """Global rank of the worker that holds this config; derived, not an option."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Node i holds the ranks from i times as many on."""
        return self.num_ranks // self.nodes

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size


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
