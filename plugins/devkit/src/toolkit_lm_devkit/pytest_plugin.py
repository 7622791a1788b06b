"""The pytest plugin, which pytest finds by entry point.

A failed assertion of the kit shows its values, as one in a test module does. The fixture `toolkit`
runs the command of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

pytest.register_assert_rewrite(
    "toolkit_lm_devkit.attention",
    "toolkit_lm_devkit.drafter",
    "toolkit_lm_devkit.equality",
    "toolkit_lm_devkit.executor",
    "toolkit_lm_devkit.kv_kind",
    "toolkit_lm_devkit.model",
    "toolkit_lm_devkit.renderer",
    "toolkit_lm_devkit.sharding",
    "toolkit_lm_devkit.structured_output",
    "toolkit_lm_devkit.transformers_model",
)


class Finished(NamedTuple):
    """Result of a run of `toolkit`."""

    code: int
    """Its exit code."""
    out: str
    err: str


@pytest.fixture
def toolkit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Finished]:
    """Runs `toolkit` in this process, with the arguments that it is called with:
    `toolkit("plugins", "list").out`."""
    # Imported here: every run of pytest loads this module.
    from toolkit_lm_cli import run

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")

    def call(*arguments: object) -> Finished:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return call
