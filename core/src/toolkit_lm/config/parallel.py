"""ParallelConfig and NodeConfig: the ranks of an engine, and this machine's place among several."""

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
            "instead of sharding each expert."
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
            "Executor, by name: how the engine reaches its workers. auto: the first that supports "
            "the number of workers."
        ),
    ] = "auto"
    rank: int = 0
    """Global rank of the worker that holds this config; derived, not an option."""

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks per machine. Node i holds that many ranks, from i times the number on."""
        return self.num_ranks // self.nodes

    @property
    def tensor_parallel_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_parallel_rank(self) -> int:
        return self.rank // self.tensor_parallel_size


class NodeConfig(Struct, frozen=True, kw_only=True):
    """This machine's number among several, and their meeting point. TOOLKIT_LM_LAUNCH_KEY may hold
    the key itself."""

    node_rank: Annotated[int, option("Number of this machine. 0 holds the engine.", ge=0)] = 0
    master: Annotated[
        str | None, option("HOST:PORT at which the other nodes reach node 0.", none="none")
    ] = None
    launch_key_file: Annotated[
        str | None,
        option(
            "File with a secret, the same on all nodes. Nodes must prove that they know it.",
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
