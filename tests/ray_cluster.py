"""A Ray cluster of the test's own, on a busy machine, and nothing that is sent to Ray's makers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

# Ray's own waits, which are short for a busy machine: what starts late is killed and started again.
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}


@contextmanager
def ray_cluster(num_cpus: int, **environment: str) -> Iterator[str]:
    """Within it, this process is connected to a cluster of `num_cpus`, and none is taken. Gives its
    address.

    `environment`: variables of this process and of the cluster's.
    """
    environment = PATIENCE | {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"} | environment
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Ray's own.
        warnings.simplefilter("ignore")
        for name, value in environment.items():
            patch.setenv(name, value)
        import ray

        _start(ray, num_cpus)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


def _start(ray, num_cpus: int) -> None:
    """Ray gives a node 30 seconds to start, which no option changes: on a busy machine it is
    started again."""
    for attempts_left in reversed(range(5)):
        try:
            ray.init(
                "local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
            )
        except Exception as error:  # Ray has no class of its own for it
            if not attempts_left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            for child in psutil.Process().children(recursive=True):
                child.kill()
        else:
            return
