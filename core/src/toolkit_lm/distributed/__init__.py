"""Groups of ranks and the collectives that layers use."""

from toolkit_lm.distributed.groups import (
    Group,
    parallel_groups,
    pipeline_parallel_group,
    tensor_parallel_group,
)

__all__ = ["Group", "parallel_groups", "pipeline_parallel_group", "tensor_parallel_group"]
