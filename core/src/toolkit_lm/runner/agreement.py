"""Agreement of ranks: a value that all ranks of the engine must reach together."""

from __future__ import annotations

import torch

from toolkit_lm.config import ParallelConfig
from toolkit_lm.distributed import pipeline_parallel_group, tensor_parallel_group


def greatest_of_ranks(
    values: list[int], parallel: ParallelConfig, device: torch.device
) -> list[int]:
    """The greatest of each value over the ranks of this pipeline stage and of the stages before it:
    on the last stage, over all ranks.

    All ranks call it in the same steps, with equally many values.
    """
    found = torch.tensor(values, device=device)
    stages = pipeline_parallel_group(parallel)
    if stages.rank > 0:
        found = torch.maximum(found, stages.recv(stages.rank - 1)["values"])
    found = tensor_parallel_group(parallel).all_gather(found[None], 0).amax(0)
    if stages.rank < stages.size - 1:
        stages.send({"values": found}, stages.rank + 1)
    greatest: list[int] = found.tolist()
    return greatest
