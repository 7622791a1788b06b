"""The engine process that begins to import before options are read."""

import os
import subprocess
import sys

import psutil
import pytest
from processes import is_alive
from toolkit_lm_cli import early
from toolkit_lm_cli.early import early_process, engine_process


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted"),
    [
        (["serve", "tiny"], {}, True),
        (["serve", "--config", "file.yaml"], {}, True),
        (["serve", "tiny", "--help"], {}, False),
        (["serve", "tiny", "--help=engine"], {}, False),
        (["serve", "tiny", "--no-engine-process"], {}, False),
        (["serve", "tiny", "--data-parallel-size=2"], {}, False),
        (["serve", "tiny"], {"TOOLKIT_LM_ENGINE_PROCESS": "false"}, False),
        (["render", "tiny"], {}, False),
        (["--help"], {}, False),
        ([], {}, False),
    ],
)
def test_which_commands_want_one(arguments, environ, wanted, monkeypatch):
    made = []

    class Process:
        def __init__(self):
            made.append(self)

        def end(self):
            made.append("ended")

    monkeypatch.setattr(early, "EngineProcess", Process)
    with engine_process(arguments, environ):
        process = early_process()
        assert (process is not None) == wanted
        # It is for one engine.
        assert early_process() is None
    assert made == ([process, "ended"] if wanted else [])
    assert early_process() is None


def test_it_ends_with_the_command():
    with engine_process(["serve"], {}):
        process = early_process()
        assert process.is_alive and process.folder.exists()
    assert not process.is_alive and not process.folder.exists()


def test_a_temporary_folder_that_is_too_long_is_said_later(monkeypatch, tmp_path):
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with engine_process(["serve"], {}):
        assert early_process() is None


def test_a_closed_stream_is_left_to_the_server(monkeypatch):
    kept = os.dup(0)
    try:
        os.close(0)
        with engine_process(["serve"], {}):
            assert early_process() is None
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_wrong_option_leaves_no_process():
    code = (
        "import os, sys, toolkit_lm.engine.process.launch as launch\n"
        "start = launch.EngineProcess.__init__\n"
        "launch.EngineProcess.__init__ = lambda self, *a: (start(self, *a), print(self.pid, "
        "self.folder, flush=True))[0]\n"
        "from toolkit_lm_cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "tiny", "--block-size", "x"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--block-size" in done.stderr
    pid, folder = done.stdout.split()
    assert not is_alive(int(pid)) and not os.path.exists(folder)


def test_the_server_uses_it():
    code = (
        "import atexit, sys, toolkit_lm.engine.process.launch as launch\n"
        "made, start = [], launch.EngineProcess.__init__\n"
        "launch.EngineProcess.__init__ = lambda self, *a: (made.append(self), start(self, *a))[1]\n"
        "from toolkit_lm_cli import main\n"
        "atexit.register(lambda: print('made', len(made), flush=True))\n"
        "main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "serve", "tiny", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout.readline().startswith("Serving tiny"), server.stderr.read()
            [engine] = psutil.Process(server.pid).children()
            server.terminate()
            assert server.stdout.read() == "made 1\n"
        finally:
            server.kill()
    assert not engine.is_running()
