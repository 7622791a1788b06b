"""The executor passes the kit: alone, tensor parallel, pipeline parallel, and both."""

from __future__ import annotations

import os
import signal

import pytest
from toolkit_lm_devkit import WorkersConformance
from toolkit_lm_devkit.executor import COURSES


class Kit(WorkersConformance):
    executor = "mp"

    def kill(self, executor):
        os.kill(executor.pids[-1], signal.SIGKILL)


class Daily(Kit):
    """What other files have for this executor is left to the night: requests that are swapped, and
    begin after cached prefixes (`test_mp_families.py`), and how ranks end (`test_mp_faults.py`)."""

    @classmethod
    def parameters(cls):
        return {**super().parameters(), "course": {"steps overlap": COURSES["steps overlap"]}}

    test_sequences_of_a_prompt_and_its_cached_prefix = None
    test_an_engine_says_why_it_is_dead = None
    test_shutdown_twice = None


class TestMp(Daily):
    ranks = ((2, 1),)
    test_tokens_are_those_of_one_rank = None


class TestMpInStages(Daily):
    ranks = ((1, 2),)
    test_a_dead_worker_fails_all_futures = None


@pytest.mark.nightly
class TestMpOfAllSizes(Kit):
    ranks = ((1, 1), (2, 1), (1, 2), (2, 2))
