"""A Ray cluster of the engine's own: what is Ray's ends with it, and nothing else does."""

from __future__ import annotations

import os
import re
import subprocess
import time

import psutil
import pytest
import ray
from processes import is_alive
from toolkit_lm.errors import EngineDeadError
from toolkit_lm_executor_ray.cluster import joined
from toolkit_lm_executor_ray.guard import is_rays
from toolkit_lm_executor_ray.local import LocalCluster

PACKAGE = os.path.dirname(ray.__file__)


@pytest.fixture
def run():
    """A function (words, **options) that starts a program, which ends with the test."""
    started = []

    def start(*words, **options):
        started.append(subprocess.Popen(words, **options))
        process = psutil.Process(started[-1].pid)
        # The system shows none while it replaces the forked process.
        while not process.cmdline():
            pass
        return process

    yield start
    for one in started:
        one.kill()
        one.wait()


def child_of(process: psutil.Process) -> psutil.Process:
    end = time.monotonic() + 10
    while not process.children() and time.monotonic() < end:
        time.sleep(0.01)
    (child,) = process.children()
    return child


def test_what_the_host_has_started_meanwhile_outlives_the_cluster(run):
    """Such as ffmpeg, of another thread: it inherits the cluster's mark, and is a child of the same
    process."""
    cluster = LocalCluster()
    with cluster.environment(), cluster.watched():
        raylet = run(
            f"{PACKAGE}/core/src/ray/raylet/raylet", "-c", "sleep 60 & wait", executable="/bin/bash"
        )
        worker = child_of(raylet)
        ffmpeg = run("/bin/bash", "-c", "sleep 60 & wait")
        part = child_of(ffmpeg)
    cluster.end()
    assert not is_alive(raylet) and not is_alive(worker)
    assert is_alive(ffmpeg) and is_alive(part)
    part.kill()


@pytest.mark.parametrize(
    ("words", "environ", "expected"),
    [
        ([f"{PACKAGE}/core/src/ray/gcs/gcs_server", "60"], {}, True),
        (["ray::IDLE", "60"], {}, True),
        (["toolkit-lm worker 0", "60"], {"RAY_RAYLET_PID": "1"}, True),
        (["toolkit-lm worker 0", "60"], {"RAY_RAYLET_PID": "2"}, False),
        (["ffmpeg", "60"], {}, False),
        (["ray", "60"], {}, False),
    ],
)
def test_whether_a_process_is_rays(run, monkeypatch, words, environ, expected):
    """The host may be a process of a raylet's itself, of number 2 here."""
    process = run(*words, executable="/bin/sleep", env=environ)
    monkeypatch.setenv("RAY_RAYLET_PID", "2")
    assert is_rays(process) is expected


def test_a_folder_that_is_not_there_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "a" / "b"))
    LocalCluster()
    (folder,) = (tmp_path / "a" / "b").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "file" / "b"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    message = (
        rf"cannot be made in '{re.escape(str(tmp_path))}/file/b': Not a directory\. Set RAY_TMPDIR"
    )
    with pytest.raises(EngineDeadError, match=message), joined("local"):
        pass
