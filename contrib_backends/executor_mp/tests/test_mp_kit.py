"""The executor passes the kit: alone, tensor parallel, pipeline parallel, and both."""

from __future__ import annotations

import os
import signal

import pytest
from toolkit_lm_devkit import WorkersConformance


class Kit(WorkersConformance):
    executor = "mp"

    def kill(self, executor):
        os.kill(executor.pids[-1], signal.SIGKILL)


class TestMp(Kit):
    ranks = ((2, 1), (1, 2))


@pytest.mark.nightly
class TestMpOfOtherSizes(Kit):
    ranks = ((1, 1), (2, 2))
