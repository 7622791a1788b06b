"""A plugin that writes down when the engine emits tokens, as lines of JSON, to the file that
EMISSION_LOG names.

`install` makes a distribution of it, in a folder for PYTHONPATH: a server that is started with it
finds it like any other plugin.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from toolkit_lm.events import Event, RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl

VARIABLE = "EMISSION_LOG"


class EmissionLog:
    """Steps, and the first and last tokens of requests, with the engine's own times."""

    def __init__(self) -> None:
        # Written without a buffer: the reader, another process, finds each line as soon as it is
        # there.
        self._file = os.open(
            os.environ.get(VARIABLE, os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    @hookimpl
    def toolkit_event(self, event: Event) -> None:
        match event:
            case StepEvent():
                self._write({"kind": "step", "time": event.time})
            case RequestEvent(kind="first_token" | "preempted" | "finished" as kind):
                self._write(
                    {
                        "kind": kind,
                        "time": event.time,
                        "prompt": event.num_prompt_tokens,
                        "output": event.num_output_tokens,
                    }
                )

    def _write(self, row: dict[str, object]) -> None:
        os.write(self._file, f"{json.dumps(row)}\n".encode())


log = EmissionLog()


def install(folder: Path) -> None:
    """Writes the distribution."""
    metadata = folder / "emission_log-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "emission_log.py").write_text(
        Path(__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: emission-log\nVersion: 1.0\nRequires-Dist: "
        "toolkit-lm-core>=0.2,<0.3\n"
    )
    (metadata / "entry_points.txt").write_text("[toolkit_lm]\nemission_log = emission_log:log\n")
