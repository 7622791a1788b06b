"""A Ray cluster of four CPUs for each file, and nothing that is sent to Ray's makers."""

from __future__ import annotations

import warnings

import psutil
import pytest

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
        # On a busy machine a proxy of Ray Serve starts for longer than the five seconds after which
        # it is killed.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        import ray

        ray.init(
            "local",
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


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
