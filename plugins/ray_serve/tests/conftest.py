"""A Ray cluster for each file, on which an app of the test's is served."""

from __future__ import annotations

import pytest
from ports import free_port
from ray_cluster import ray_cluster


@pytest.fixture(scope="module")
def port():
    """The port at which Ray Serve listens, on a cluster of six CPUs."""
    with ray_cluster(6), pytest.MonkeyPatch.context() as patch:
        from ray import serve
        from ray.serve._private import api, client

        for module in (api, client):
            patch.setattr(module, "HTTP_PROXY_TIMEOUT", 300)
        number = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": number})
        yield number
        serve.shutdown()
