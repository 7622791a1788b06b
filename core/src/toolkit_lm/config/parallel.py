"""ParallelConfig: the ranks of an engine."""

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
