"""Process groups of ranks and the collectives that layers use."""

from toolkit_lm.distributed.groups import Group, destroy, initialize, pipeline_parallel_group, tensor_parallel_group

__all__ = ["Group", "destroy", "initialize", "pipeline_parallel_group", "tensor_parallel_group"]
