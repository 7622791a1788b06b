"""How many engines the load needs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class Policy:
    """Number of engines that brings the wait and the fill down to their most: their mean, as a
    multiple of that, times the engines that there are. Ray Serve applies bounds and delays."""

    def __init__(self, max_wait: float, max_fill: float) -> None:
        self._most = {"wait": max_wait, "fill": max_fill}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of engines, and the policy's state, of which it has none."""
        shares = [
            sum(values.values()) / len(values) / most
            for name, most in self._most.items()
            if (values := (context.aggregated_metrics or {}).get(name))
        ]
        if not shares or not context.current_num_replicas:
            return context.target_num_replicas, {}
        # A mean just above its most is noise.
        return max(math.ceil(max(shares) * context.current_num_replicas - 0.1), 1), {}
