"""The app: its deployments, and the room that each takes."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from toolkit_lm.config import VllmConfig
from toolkit_lm_router.options import RouterOptions

from toolkit_lm_ray_serve.engine import FRONT, Engine
from toolkit_lm_ray_serve.front import Front
from toolkit_lm_ray_serve.options import Scaling, read
from toolkit_lm_ray_serve.scaling import Policy

_BEAT = 1.0
"""Seconds from one word of an engine's to the front, and to Ray Serve, to the next."""
_GRACE = 30.0
"""Seconds that an engine gets to end, beyond those of its requests."""


def make(config: Mapping[str, Any]) -> Application:
    """The app. Raises ConfigError, and pydantic's ValidationError for numbers of engines that Ray
    Serve refuses."""
    options = read(config)
    scaling = Scaling(**options["scaling"])
    router = RouterOptions(**options["router"]).shared_by(scaling.num_fronts)
    key = router.backend_key or secrets.token_urlsafe(32)
    engines = serve.deployment(Engine).options(
        name="engine",
        ray_actor_options=_room(VllmConfig.make(**options["engine"]), scaling),
        autoscaling_config=_autoscaling(scaling),
        health_check_period_s=_BEAT,
        graceful_shutdown_timeout_s=scaling.drain_timeout + _GRACE,
    )
    front = serve.deployment(serve.ingress()(Front)).options(
        name=FRONT,
        num_replicas=scaling.num_fronts,
        # The router's queue and body memory bound them.
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=scaling.drain_timeout + _GRACE,
    )
    server = options["server"] | {"api_key": [key], "shutdown_timeout": scaling.drain_timeout}
    own = asdict(router) | {"backend_key": key}
    return front.bind(engines.bind(options["engine"], server), own, scaling.num_fronts)


def _room(config: VllmConfig, scaling: Scaling) -> dict[str, float]:
    """Resources that Ray sets aside for an engine and its ranks. Those of the executor 'ray' are in
    a placement group of their own."""
    num_ranks = 0 if config.parallel.executor == "ray" else config.parallel.num_ranks
    num_gpus = num_ranks if config.device.device.startswith("cuda") else 0
    return {"num_cpus": scaling.cpus * max(num_ranks, 1), "num_gpus": num_gpus}


def _autoscaling(scaling: Scaling) -> AutoscalingConfig:
    targets = {"max_wait": scaling.max_wait, "max_fill": scaling.max_fill}
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay,
        downscale_delay_s=scaling.downscale_delay,
        metrics_interval_s=_BEAT,
        # Ray Serve takes the mean of signals over it.
        look_back_period_s=5.0,
        policy=AutoscalingPolicy(policy_function=Policy, policy_kwargs=targets),
    )
