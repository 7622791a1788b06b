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
        return {**super().parameters(), "course": {"swapped": COURSES["swapped"]}}

    test_sequences_of_a_prompt_and_its_cached_prefix = None
    # `test_ray.py` has how ranks end.
    test_an_engine_says_why_it_is_dead = None
    test_a_dead_worker_fails_all_futures = None
    test_shutdown_twice = None


@pytest.mark.nightly
class TestRayInAllCourses(Kit):
    pass
