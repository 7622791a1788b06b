"""A plugin of pytest: of each file the tests that need a card, and a line for each test the moment
that it is over."""

from __future__ import annotations

import json
import os

import pytest

from gpu_kit.report import die_with_the_kit, emit, shortened, tell_where

SELECT = "GPU_KIT_SELECT"
FIRST = "GPU_KIT_FIRST"
"""Environment variables: a word for each file, which the names of its tests must have; how many of
each file, or nothing for all."""
MESSAGE = 600
"""Characters of an exception's message that are kept: a compiler's goes on with all it was
given."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        die_with_the_kit()
        config.pluginmanager.register(Lines())
    else:
        tell_where()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what is wanted. A dry run takes the first tests of each file, also where their names do
    not have the word."""
    words: dict[str, str] = json.loads(os.environ[SELECT])
    first = os.environ.get(FIRST)
    kept = []
    for file, word in words.items():
        own = [item for item in items if item.nodeid.partition("::")[0] == file]
        kept += (
            [item for item in own if word in item.nodeid] if first is None else own[: int(first)]
        )
    items[:] = kept


class Lines:
    """Not in the workers, whose reports come here."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            emit(
                report.nodeid,
                "failed",
                why="it cannot be imported",
                traceback=shortened(report.longreprtext),
            )
        elif report.skipped:
            emit(report.nodeid, "skipped", why=_reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = round(report.duration, 3)
        if report.failed:
            emit(
                report.nodeid,
                "failed",
                seconds=seconds,
                why=_message(report),
                traceback=shortened(report.longreprtext),
            )
        elif report.skipped:
            emit(report.nodeid, "skipped", why=_reason(report))
        elif report.when == "call":
            emit(report.nodeid, "passed", seconds=seconds)


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)


def _message(report: pytest.TestReport) -> str:
    """The exception with its first lines, and its place."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        lines = report.longreprtext.strip().splitlines()
        return lines[-1][:MESSAGE] if lines else f"it failed in its {report.when}"
    place = f"{crash.path}:{crash.lineno}"
    return f"{crash.message[:MESSAGE].strip()} ({place})"
