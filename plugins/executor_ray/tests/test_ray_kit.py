"""The executor passes the kit."""

from __future__ import annotations

import pytest
from toolkit_lm_devkit import WorkersConformance
from toolkit_lm_devkit.executor import COURSES


class Kit(WorkersConformance):
    executor = "ray"
    ranks = ((2, 1),)

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster, processes):
        self.processes = processes

    def kill(self, executor):
        # Others are of the executor that other tests share.
        max(self.processes("toolkit-lm worker"), key=lambda one: one.create_time()).kill()


@pytest.mark.slow
class TestRay(Kit):
    @classmethod
    def parameters(cls):
        """Its workers are those of `mp`, which are tested in all courses."""
        courses = {name: COURSES[name] for name in ("swapped", "steps overlap")}
        return {**super().parameters(), "course": courses}


@pytest.mark.nightly
class TestRayInAllCourses(Kit):
    pass
