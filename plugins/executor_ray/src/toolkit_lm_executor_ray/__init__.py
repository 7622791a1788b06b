"""Tensor and pipeline parallel over a Ray cluster: Ray places the workers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from toolkit_lm.plugin import ExecutorRegistry, hookimpl


class Options(Struct, frozen=True):
    """`--plugin-option executor_ray.NAME=...`"""

    address: str = "auto"
    """Address of the cluster. auto: RAY_ADDRESS, or this machine's cluster, which must run. local:
    a cluster that the engine starts and ends.

    A process that is connected to Ray already stays with that cluster."""
    cpus: Annotated[int, Meta(ge=1)] = 1
    """CPUs that Ray sets aside for each rank, which computes in as many threads."""
    strategy: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] = "SPREAD"
    """How Ray places the nodes. The ranks of one node are always on one machine."""
    placement_timeout: Annotated[int, Meta(ge=1)] = 60
    """Seconds that Ray may take to find room."""
    runtime_env: str | dict[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the nodes, in JSON: {"pip": ["toolkit-lm-mymodel==1.0"]} has it
    install a plugin there."""


@hookimpl
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    executors.add("ray", "toolkit_lm_executor_ray.executor:RayExecutor", runs_nodes=True)
