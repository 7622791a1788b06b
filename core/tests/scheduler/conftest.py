"""The tests here share `fake_engine`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def clock(monkeypatch):
    """The scheduler's clock for deadlines. `clock.now` changes only when a test sets it."""
    found = SimpleNamespace(now=1000.0)
    found.monotonic = lambda: found.now
    monkeypatch.setattr("toolkit_lm.scheduler.scheduler.time", found)
    return found


@pytest.fixture(autouse=True)
def quiet():
    """Thousands of steps fail here, and each would be logged with its traceback."""
    logger = logging.getLogger("toolkit_lm.engine.core")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
