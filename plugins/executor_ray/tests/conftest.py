"""A Ray cluster of four CPUs for each file, and nothing that is sent to Ray's makers."""

from __future__ import annotations

import warnings

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
PLUGINS = "cli,decoder,executor_mp,executor_ray,loaders,renderer_hf,sdpa,tiny"


@pytest.fixture(scope="module")
def cluster():
    """The cluster's address. This process is connected to it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Ray's own.
        warnings.simplefilter("ignore")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("TOOLKIT_LM_PLUGINS", PLUGINS)
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, value in PATIENCE.items():
            patch.setenv(name, value)
        import ray

        start(ray)
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


def start(ray) -> None:
    """Ray gives a node 30 seconds to start, which no option changes: on a busy machine it is
    started again."""
    for attempts_left in reversed(range(5)):
        try:
            ray.init(
                "local",
                num_cpus=4,
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


@pytest.fixture
def processes():
    """A function (word) that gives the processes of this one whose command has the word."""

    def find(word: str) -> list[psutil.Process]:
        found = []
        for one in psutil.Process().children(recursive=True):
            try:
                command = " ".join(one.cmdline())
            except psutil.Error:
                continue
            if word in command:
                found.append(one)
        return found

    return find
