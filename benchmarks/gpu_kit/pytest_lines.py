"""A plugin of pytest: of each file the tests that need a card, and a line for each test the moment
that it is over."""

from __future__ import annotations

import json
import os

import pytest

from gpu_kit.report import LONGEST, die_with_the_kit, emit

SELECT = "GPU_KIT_SELECT"
FIRST = "GPU_KIT_FIRST"
"""Environment variables: a word for each file, which the names of its tests must have; how many of
each file, or nothing for all."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        die_with_the_kit()
        config.pluginmanager.register(Lines())


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
                traceback=report.longreprtext[-LONGEST:],
            )
        elif report.skipped:
            emit(report.nodeid, "skipped", why=_reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = round(report.duration, 3)
        if report.failed:
            shown = report.longreprtext
            why = (
                shown.strip().splitlines()[-1]
                if shown.strip()
                else f"it failed in its {report.when}"
            )
            emit(
                report.nodeid, "failed", seconds=seconds, why=why[:300], traceback=shown[-LONGEST:]
            )
        elif report.skipped:
            emit(report.nodeid, "skipped", why=_reason(report))
        elif report.when == "call":
            emit(report.nodeid, "passed", seconds=seconds)


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)
