"""The executor passes the kit."""

from __future__ import annotations

import pytest
from toolkit_lm_devkit import WorkersConformance


@pytest.mark.slow
class TestRay(WorkersConformance):
    executor = "ray"
    ranks = ((2, 1),)

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster, processes):
        self.processes = processes

    def kill(self, executor):
        # Others are of the executor that other tests share.
        max(self.processes("toolkit-lm worker"), key=lambda one: one.create_time()).kill()
