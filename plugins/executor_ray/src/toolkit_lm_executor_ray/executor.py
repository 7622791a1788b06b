"""The executor whose workers Ray places."""

from __future__ import annotations

from functools import partial

from toolkit_lm_executor_mp.executor import MpExecutor
from toolkit_lm_executor_mp.link import Link

from toolkit_lm_executor_ray.nodes import RayNodes


class RayExecutor(MpExecutor):
    """Ray places an actor for each node, and reserves resources for its ranks. The actor starts the
    ranks, like `toolkit worker`.

    Plans, results and tensors go their own way: Ray carries only the actors' arguments, which are
    text, numbers and bytes."""

    def make_link(self) -> Link:
        return Link(self.config, partial(RayNodes, options=self._plugins.options("executor_ray")))
