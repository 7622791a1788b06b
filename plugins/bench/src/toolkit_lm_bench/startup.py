"""From the start of a process to its first token."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import median

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve

from toolkit_lm_bench.cold import drop_pages, package_files

STATES = ("cold", "warm")
_MOST_SECONDS = 600
_POLL = 0.01
"""Seconds between two looks at a server that starts."""
_PROBE = (
    "import time; begun = time.monotonic(); from toolkit_lm_bench.probe import main; main(begun)"
)
_SERVE = "from toolkit_lm_cli import main; main()"


@dataclass(frozen=True)
class Startup:
    """Medians of some starts, in seconds."""

    way: str
    state: str
    runs: int
    phases: dict[str, float]
    """One after another. Their sum need not be the total: each is a median of its own."""
    total: float


def measure(config: VllmConfig, plugins: Plugins, way: str, state: str, runs: int) -> Startup:
    """Starts `way` (a key of WAYS) `runs` times, each time in a `state` of STATES. Raises
    ToolkitError when one does not come up."""
    checkpoint = resolve(config, plugins).checkpoint
    assert checkpoint is not None
    files = [path for path in Path(checkpoint.path).rglob("*") if path.is_file()]
    with tempfile.TemporaryDirectory() as folder:
        options = Path(folder) / "options.yaml"
        # JSON is YAML.
        options.write_text(json.dumps(options_given(config)))
        start = WAYS[way]
        warm = with_bytecode(os.environ, Path(folder))
        if state == "warm":
            start(options, warm)
        found = []
        for run in range(runs):
            environ = warm
            if state == "cold":
                environ = {
                    **os.environ,
                    "PYTHONPYCACHEPREFIX": str(Path(folder) / f"bytecode-{run}"),
                }
                drop_pages([*files, *package_files()])
            found.append(start(options, environ))
    # A phase that is over between two looks is not seen.
    phases = {
        phase: median(phases.get(phase, 0.0) for phases in found)
        for phase in dict.fromkeys(name for phases in found for name in phases)
    }
    return Startup(way, state, runs, phases, median(sum(phases.values()) for phases in found))


def with_bytecode(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Environment in which a warm start finds bytecode, like that of packages that pip installed.
    It is in `folder` if Python may not write it next to the source."""
    if "PYTHONDONTWRITEBYTECODE" not in environ:
        return dict(environ)
    kept = {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), **kept}


def options_given(config: VllmConfig) -> dict[str, object]:
    """The options that differ from their defaults, by name."""
    values = {
        name: value
        for section in msgspec.to_builtins(config).values()
        if isinstance(section, dict)
        for name, value in section.items()
    }
    return {o.name: values[o.name] for o in VllmConfig.options() if values[o.name] != o.default}


def start_offline(options: Path, environ: dict[str, str]) -> dict[str, float]:
    """LLM in a process of its own: the seconds of each phase. Raises ToolkitError."""
    start = time.monotonic()
    done = subprocess.run(  # nosec B603 # our own words
        [sys.executable, "-c", _PROBE, str(start), str(options)],
        capture_output=True,
        text=True,
        env=environ,
        timeout=_MOST_SECONDS,
    )
    if done.returncode != 0:
        raise ToolkitError(f"the measured process failed: {done.stderr[-2000:]}")
    return {
        str(phase): float(seconds)
        for phase, seconds in json.loads(done.stdout.splitlines()[-1]).items()
    }


def start_server(options: Path, environ: dict[str, str]) -> dict[str, float]:
    """`toolkit serve`, looked at from outside: the seconds of each phase. Raises ToolkitError."""
    port = _free_port()
    start = time.monotonic()
    with _server(options, port, environ) as check:
        phases = {}
        last = "front"
        while last != "ready":
            status = _status(port)
            now = time.monotonic()
            if status not in (None, last):
                phases[last], last, start = now - start, status, now
            elif now - start > _MOST_SECONDS:
                raise ToolkitError(f"the server was not ready after {_MOST_SECONDS} s.")
            check()
            time.sleep(_POLL)
        _first_token(port)
        # Its end is no part of its start.
        return {**phases, "first streamed token": time.monotonic() - start}


WAYS: dict[str, Callable[[Path, dict[str, str]], dict[str, float]]] = {
    "offline": start_offline,
    "server": start_server,
}


@contextmanager
def _server(options: Path, port: int, environ: dict[str, str]) -> Iterator[Callable[[], None]]:
    """A server on a port. Gives a check that raises ToolkitError when it has ended."""
    command = [
        sys.executable,
        "-c",
        _SERVE,
        "serve",
        "--config",
        str(options),
        "--port",
        str(port),
        "--no-access-log",
    ]
    with tempfile.TemporaryFile("w+") as log:
        # The words are our own.
        process = subprocess.Popen(  # nosec B603
            command, stdout=subprocess.DEVNULL, stderr=log, env=environ
        )

        def check() -> None:
            if process.poll() is not None:
                log.seek(0)
                raise ToolkitError(
                    f"the server ended with exit code {process.returncode}: {log.read()[-2000:]}"
                )

        try:
            yield check
        finally:
            process.terminate()
            process.wait(_MOST_SECONDS)


def _status(port: int) -> str | None:
    """Status from /ready: "ready", or the engine's phase of starting. None until the server
    listens."""
    try:
        with closing(HTTPConnection("127.0.0.1", port, timeout=_MOST_SECONDS)) as connection:
            connection.request("GET", "/ready")
            reply = connection.getresponse()
            body = json.loads(reply.read())
    except OSError:
        return None
    return "ready" if reply.status == 200 else f"engine: {body.get('reason', body['status'])}"


def _first_token(port: int) -> None:
    """Asks for a stream, and reads its first event."""
    body = json.dumps({"prompt": [5, 6, 7], "max_tokens": 1, "temperature": 0, "stream": True})
    with closing(HTTPConnection("127.0.0.1", port, timeout=_MOST_SECONDS)) as connection:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        line = reply.readline()
        if reply.status != 200 or not line.startswith(b"data: "):
            raise ToolkitError(
                f"the server answered with {reply.status}: {line.decode(errors='replace')}"
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
