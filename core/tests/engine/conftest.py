"""The tests here use the scheduler's `fake_engine`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))


@pytest.fixture(autouse=True)
def quiet():
    """Steps fail here, and each would be logged with its traceback."""
    logger = logging.getLogger("toolkit_lm.engine.core")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
