"""A Ray cluster for each file, on which an app of the test's is served."""

from __future__ import annotations

import warnings

import psutil
import pytest
from ports import free_port

# Ray's own waits, which are short for a busy machine: what starts late is killed and started again.
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "300",
    "RAY_gcs_server_request_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "300",
}


@pytest.fixture(scope="module")
def cluster():
    """This process is connected to a cluster of six CPUs, which nobody has."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Ray's own.
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, value in PATIENCE.items():
            patch.setenv(name, value)
        import ray

        start(ray)
        from ray.serve._private import api, client

        for module in (api, client):
            patch.setattr(module, "HTTP_PROXY_TIMEOUT", 300)
        yield
        ray.shutdown()


def start(ray) -> None:
    """Ray gives a node 30 seconds to start, which no option changes: on a busy machine it is
    started again."""
    for attempts_left in reversed(range(5)):
        try:
            ray.init(
                "local",
                num_cpus=6,
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


@pytest.fixture(scope="module")
def port(cluster):
    """The port at which Ray Serve listens."""
    from ray import serve

    number = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": number})
    yield number
    serve.shutdown()
