"""The executor passes the kit: alone, tensor parallel, pipeline parallel, and both."""

from __future__ import annotations

import os
import signal

from toolkit_lm_devkit import WorkersConformance


class TestMp(WorkersConformance):
    executor = "mp"
    ranks = ((1, 1), (2, 1), (1, 2), (2, 2))

    def kill(self, executor):
        os.kill(executor.pids[-1], signal.SIGKILL)
