"""Results of pooling requests as tensors, which vLLM's are."""

from __future__ import annotations

import torch
from toolkit_lm import PoolingRequestOutput


def as_tensors(outputs: list[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
    """The same outputs, of which `outputs.data` is a tensor."""
    for output in outputs:
        data = output.outputs.data
        if data is not None:
            # mypy: the field is an array of core's. A copy: arrays are read-only.
            output.outputs.data = torch.tensor(data)  # type: ignore[assignment]
    return outputs
