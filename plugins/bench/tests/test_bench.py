"""`toolkit bench startup`, with the smallest of measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm_bench import cold
from toolkit_lm_bench.startup import measure, options_given, start_offline, start_server


def toolkit(*arguments):
    command = [sys.executable, "-c", "from toolkit_lm_cli import main; main()", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    "way",
    # `test_its_table_and_its_options` has the other.
    [
        pytest.param("server", marks=pytest.mark.slow),
        pytest.param("offline", marks=pytest.mark.nightly),
    ],
)
def test_startup_of_the_tiny_model(way):
    done = toolkit(
        "bench",
        "startup",
        "tiny",
        "--runs",
        "1",
        "--ways",
        way,
        "--states",
        "warm",
        "--max-model-len",
        "64",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert (found["way"], found["state"], found["runs"]) == (way, "warm", 1)
    assert all(seconds >= 0 for seconds in found["phases"].values())
    assert found["total"] == pytest.approx(sum(found["phases"].values()))
    assert 0.1 < found["total"] < 100
    assert (
        list(found["phases"])[-1]
        == {"offline": "first token", "server": "first streamed token"}[way]
    )


@pytest.mark.slow
def test_its_table_and_its_options():
    done = toolkit("bench", "startup", "--runs", "1", "--ways", "offline", "--states", "warm")
    assert (
        done.returncode == 0
        and "start to first token" in done.stdout
        and "tiny, offline" in done.stdout
    )
    wrong = toolkit("bench", "startup", "--states", "hot")
    assert wrong.returncode == 2 and "'hot' is not known. Known: cold, warm." in wrong.stderr
    assert "startup" in toolkit("bench", "--help").stdout


def test_a_start_that_fails_says_why(tmp_path):
    options = tmp_path / "options.yaml"
    options.write_text('{"model": "tiny", "num_kv_blocks": 1}')
    with pytest.raises(ToolkitError, match="the KV cache cannot hold one sequence"):
        start_offline(options, dict(os.environ))


def test_only_what_differs_is_handed_on():
    assert options_given(VllmConfig.make(model="m", block_size=32, plugins=["a", "b"])) == {
        "model": "m",
        "block_size": 32,
        "plugins": ["a", "b"],
    }


def test_a_cold_start_drops_pages_and_finds_no_bytecode(monkeypatch):
    seen = []
    dropped = []
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr("toolkit_lm_bench.startup.drop_pages", dropped.append)
    # There are too many of them to be listed for each run.
    known = next(iter(cold.package_files()))
    monkeypatch.setattr("toolkit_lm_bench.startup.package_files", lambda: [known])
    monkeypatch.setitem(
        measure.__globals__["WAYS"],
        "offline",
        lambda options, environ: seen.append(environ) or {"all": 1.0},
    )
    measure(VllmConfig.make(model="tiny"), Plugins.load(), "offline", "cold", 2)
    measure(VllmConfig.make(model="tiny"), Plugins.load(), "offline", "warm", 2)
    assert ["bytecode" in one.get("PYTHONPYCACHEPREFIX", "") for one in seen] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert len({one["PYTHONPYCACHEPREFIX"] for one in seen[:2]}) == 2
    assert len(dropped) == 2
    for files in dropped:
        assert known in files and any(path.name == "model.safetensors" for path in files)


def test_a_warm_start_finds_bytecode_where_none_may_be_written_beside_the_source(monkeypatch):
    seen = []
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setitem(
        measure.__globals__["WAYS"],
        "offline",
        lambda options, environ: seen.append(environ) or {"all": 1.0},
    )
    measure(VllmConfig.make(model="tiny"), Plugins.load(), "offline", "warm", 2)
    assert len({one["PYTHONPYCACHEPREFIX"] for one in seen}) == 1
    assert not any("PYTHONDONTWRITEBYTECODE" in one for one in seen)


def test_the_end_of_a_server_is_no_part_of_its_start(monkeypatch, tmp_path):
    ended = contextmanager(lambda *_: (yield lambda: None) or time.sleep(1))
    monkeypatch.setattr("toolkit_lm_bench.startup._server", ended)
    monkeypatch.setattr("toolkit_lm_bench.startup._status", lambda port: "ready")
    monkeypatch.setattr("toolkit_lm_bench.startup._first_token", lambda port: None)
    assert sum(start_server(tmp_path, {}).values()) < 1


def test_pages_are_dropped(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    calls = []
    file.write_bytes(b"x" * 10)
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: calls.append(arguments[1:]))
    cold.drop_pages([file, tmp_path / "gone"])
    assert calls == [(0, 0, os.POSIX_FADV_DONTNEED)]
    monkeypatch.delattr(os, "posix_fadvise")
    with pytest.raises(ToolkitError, match="cannot drop files from the page cache"):
        cold.drop_pages([file])
