"""A Ray cluster of four CPUs for each file."""

from __future__ import annotations

import pytest
from processes import descendants
from ray_cluster import ray_cluster

PLUGINS = "cli,decoder,executor_mp,executor_ray,loaders,renderer_hf,sdpa,tiny"


@pytest.fixture(scope="module")
def cluster():
    """The cluster's address. This process is connected to it."""
    with ray_cluster(4, TOOLKIT_LM_PLUGINS=PLUGINS) as address:
        yield address


@pytest.fixture
def processes():
    """A function (word) that gives the processes of this one whose command has the word."""
    return descendants
