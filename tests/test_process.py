"""The engine process: how it starts and fails to start, and that nothing is left behind whichever
process dies, and when."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import Struct
from msgspec.structs import replace
from processes import wait_until_gone
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.engine.process.launch import EngineProcess
from toolkit_lm.errors import CapacityError, ConfigError, EngineDeadError, PluginError, RequestError
from toolkit_lm.frontend.llm_engine import LLMEngine
from toolkit_lm.plugin import Fingerprint, Plugins, hookimpl

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"model": "tiny", "num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 8}
PHASES = ["starting", "importing", "loading the model", "warming up", "serving"]

SLOW_PLUGIN = """
    import os
    import sys
    import time
    from typing import Any

    from toolkit_lm.plugin import hookimpl
    from msgspec import Struct

    class Options(Struct):
        note: Any = None

    importing = os.environ.get("SLOW_PHASE") == "importing"
    if "toolkit_lm.engine.process.main" in sys.modules and importing:
        time.sleep(60)

    @hookimpl
    def toolkit_register_models(models):
        models.add("LlamaForCausalLM", "slow_plugin_target:SlowLlama", override=True)
"""
SLOW_TARGET = """
    import ctypes
    import os
    import time
    import traceback

    from toolkit_lm_decoder.llama import LlamaForCausalLM

    PHASE = os.environ.get("SLOW_PHASE")

    class SlowLlama(LlamaForCausalLM):
        steps = 0

        def __init__(self, **arguments):
            if PHASE == "loading the model":
                time.sleep(60)
            if PHASE == "failing":
                raise ZeroDivisionError("one over nothing")
            super().__init__(**arguments)

        def forward(self, *arguments, **keywords):
            self.steps += 1
            if PHASE == "writing":
                os.write(2, b"a step\\n")
            # Two steps are the warm-up's.
            if PHASE == "warming up":
                time.sleep(60)
            if PHASE == "serving" and self.steps > 4:
                # It holds the interpreter lock: no other thread of the process runs.
                # A signal ends one sleep.
                while True:
                    ctypes.PyDLL(None).sleep(60)
            if self.steps > 2:
                if PHASE == "printing":
                    try:
                        raise ValueError("no more\\nof that")
                    except ValueError:
                        traceback.print_exc()
                if PHASE == "aborting":
                    os.abort()
                if PHASE == "talking":
                    os.write(2, b"x\\n" + b"y" * 1_000_000)
                if PHASE in ("printing", "silent", "talking"):
                    os._exit(7)
            return super().forward(*arguments, **keywords)
"""
FRONT = """
    import asyncio
    import sys
    from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig

    async def main():
        config = VllmConfig.make(
            model="tiny", num_kv_blocks=64, max_model_len=256, max_num_seqs=8
        )
        llm = AsyncLLM(config, wait=False)
        print(llm.engine.client.process.pid, llm.engine.client.process.folder, flush=True)
        if sys.argv[1] == "serving":
            async for output in llm.generate("a", SamplingParams(max_tokens=100, ignore_eos=True)):
                print("there", flush=True)
        while llm.health().reason != sys.argv[1]:
            await asyncio.sleep(0.01)
        print("there", flush=True)
        await asyncio.sleep(60)

    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory) -> Path:
    """A folder with an installed plugin whose model is slow in the phase that SLOW_PHASE names."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "slow_plugin.py").write_text(textwrap.dedent(SLOW_PLUGIN))
    (folder / "slow_plugin_target.py").write_text(textwrap.dedent(SLOW_TARGET))
    metadata = folder / "slow_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: slow-plugin\nVersion: 1.0\nRequires-Dist: "
        "toolkit-lm-core>=0.1\n"
    )
    (metadata / "entry_points.txt").write_text("[toolkit_lm]\nslow = slow_plugin\n")
    return folder


@pytest.fixture
def slow(slow_folder, monkeypatch):
    """slow(phase): from now on engines take a minute in that phase. In "failing" their model cannot
    be made."""
    monkeypatch.syspath_prepend(str(slow_folder))
    monkeypatch.setenv("PYTHONPATH", str(slow_folder), prepend=os.pathsep)

    def choose(phase: str) -> None:
        monkeypatch.setenv("SLOW_PHASE", phase)

    yield choose
    for name in ("slow_plugin", "slow_plugin_target"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def sockets(tmp_path, monkeypatch):
    """Sockets get a folder of their own, which must be empty afterwards. Its name is short, as a
    socket's must be."""
    folder = tempfile.mkdtemp(prefix="s")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setenv("TMPDIR", folder)
    yield Path(folder)
    left = os.listdir(folder)
    shutil.rmtree(folder)
    assert left == []


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


async def ask(llm, params=GREEDY, **options):
    async for output in llm.generate("Once upon a time", params, **options):
        last = output
    return last.outputs[0]


class TestStart:
    def test_the_socket_folder_is_private_and_gone_once_both_are_connected(self, sockets):
        with LLMEngine(VllmConfig.make(**SMALL, engine_process=True), wait=False) as engine:
            folder = engine.client.process.folder
            modes = []
            while not engine.wait_ready(0.001):
                if folder.exists():
                    modes.append(folder.stat().st_mode & 0o777)
            assert set(modes) == {0o700} and not folder.exists()
            assert engine.wait_ready()

    def test_nobody_can_make_the_socket_folder_first(self, monkeypatch):
        start = subprocess.Popen
        taken = []

        def after_others(command, **options):
            # Whoever reads the command line may make what it names.
            for argument in command:
                if argument.startswith(tempfile.gettempdir()):
                    with suppress(FileExistsError):
                        os.mkdir(argument)
                        taken.append(argument)
            return start(command, **options)

        monkeypatch.setattr(subprocess, "Popen", after_others)
        with LLM(**SMALL, engine_process=True):
            assert taken == []

    def test_where_the_front_ignores_what_becomes_of_children(self):
        """SIGCHLD is ignored, like after `trap '' CHLD` in a shell: child processes inherit an
        ignored signal."""
        code = (
            "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nfrom toolkit_lm "
            "import LLM\n"
            f"with LLM(**{SMALL!r}, engine_process=True): print('ready')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
        )
        assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr

    def test_llm_gives_the_same_with_and_without(self):
        results = []
        for process in (True, False):
            with LLM(**SMALL, engine_process=process) as llm:
                outputs = llm.generate(
                    ["Once", "There was"], GREEDY.replace(n=2, logprobs=1), use_tqdm=False
                )
                results.append(
                    [
                        (o.text, o.token_ids, len(o.logprobs))
                        for output in outputs
                        for o in output.outputs
                    ]
                )
        assert results[0] == results[1]

    def test_a_start_that_fails_raises_its_own_error(self):
        with pytest.raises(CapacityError, match="one sequence of max_model_len 256") as caught:
            AsyncLLM(VllmConfig.make(**{**SMALL, "num_kv_blocks": 3}))
        assert (
            "In the engine process" in caught.value.__notes__[0]
            and "_plan_kv_cache" in caught.value.__notes__[0]
        )
        with pytest.raises(ConfigError, match="device 'warp' cannot be used"):
            LLM(**SMALL, engine_process=True, device="warp")

    def test_requests_of_an_engine_that_does_not_start(self):
        async def body():
            llm = AsyncLLM(VllmConfig.make(**{**SMALL, "num_kv_blocks": 3}), wait=False)
            assert llm.health().status == "starting"
            asked = asyncio.create_task(ask(llm))
            with pytest.raises(CapacityError):
                await llm.wait_ready()
            with pytest.raises(EngineDeadError, match="one sequence of max_model_len"):
                await asked
            assert llm.health().status == "dead" and isinstance(llm.error, CapacityError)
            await llm.aclose()

        asyncio.run(body())

    def test_a_plugins_own_error_is_told(self, slow):
        slow("failing")
        with pytest.raises(Exception, match="one over nothing") as caught:
            AsyncLLM(VllmConfig.make(**SMALL))
        assert "slow_plugin_target.py" in caught.value.__notes__[0]

    def test_start_timeout(self, slow):
        slow("importing")
        with pytest.raises(
            EngineDeadError,
            match=r"not ready after 0\.5 seconds \(start_timeout\): it was still importing",
        ):
            AsyncLLM(VllmConfig.make(**SMALL, start_timeout=0.5))

    def test_closing_during_the_start(self, slow):
        slow("loading the model")
        llm = AsyncLLM(VllmConfig.make(**SMALL), wait=False)
        pid = llm.engine.client.process.pid
        start = time.monotonic()
        llm.close()
        assert time.monotonic() - start < 8
        wait_until_gone(pid)

    def test_a_temporary_folder_with_a_long_name(self, tmp_path, monkeypatch):
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(ConfigError, match="Set TMPDIR"):
            AsyncLLM(VllmConfig.make(**SMALL))


class Watcher:
    """A plugin given from code, with options, that the engine does not need."""

    name = "watcher"

    class Options(Struct):
        note: Any = None

    @hookimpl
    def toolkit_event(self, event):
        pass


class TestPlugins:
    def test_other_plugins_in_the_engine_are_refused(self, monkeypatch):
        fingerprint = Plugins.fingerprint

        def other(self, **arguments):
            mine = fingerprint(self, **arguments)
            return Fingerprint(
                "0.0.7",
                tuple(
                    replace(p, content="f" * 64) if p.name == "sdpa" else p for p in mine.plugins
                ),
            )

        monkeypatch.setattr(Plugins, "fingerprint", other)
        with pytest.raises(
            PluginError,
            match=r"(?s)toolkit-lm-core: 0\.0\.7 here, .* there.*plugin 'sdpa': "
            r".*\(ffffffffffff\) here",
        ):
            AsyncLLM(VllmConfig.make(**SMALL))

    def test_an_object_that_the_engine_needs_is_refused(self):
        class Models:
            name = "mine"

            @hookimpl
            def toolkit_register_models(self, models):
                models.add("MineForCausalLM", "mine:Model")

        with pytest.raises(
            PluginError,
            match=r"plugin 'mine' \(given from code\) implements "
            r"toolkit_register_models.*engine_process",
        ):
            AsyncLLM(VllmConfig.make(**SMALL), plugins=[Models()])

    @pytest.mark.parametrize(
        "value",
        [(1, 2), {1, 2}, {1: {"a": object()}}, 2**70],
        ids=["tuple", "set", "object", "large"],
    )
    def test_options_that_cannot_be_sent(self, slow, value):
        slow("none")
        with pytest.raises(ConfigError, match="Options of plugins must be plain values"):
            AsyncLLM(VllmConfig.make(**SMALL, plugin_option={"slow": {"note": value}}))

    def test_options_arrive_and_those_of_an_object_stay(self, slow):
        slow("none")
        given = {"slow": {"note": {"a": [1, 2.5, None, "ü"]}}, "watcher": {"note": (1, 2)}}
        with LLM(
            config=VllmConfig.make(**SMALL, engine_process=True, plugin_option=given),
            plugins=[Watcher()],
        ) as llm:
            assert llm.config.plugins.plugin_option == given

    def test_a_request_that_cannot_be_sent_fails_alone(self):
        with LLM(**SMALL, engine_process=True) as llm:
            good, bad = (
                llm.engine.processor.prepare(name, "Once", GREEDY) for name in ("good", "bad")
            )
            bad.message.context["x"] = object()
            with pytest.raises(RequestError, match="cannot be sent"):
                llm.engine.submit(bad)
            llm.engine.submit(good)
            lengths = [0]
            while llm.engine.has_unfinished_requests():
                lengths += [len(output.outputs[0].token_ids) for output in llm.engine.step()]
            assert lengths[-1] == 12


def start_front(phase: str) -> tuple[subprocess.Popen, int, Path]:
    """A front, in a process of its own, whose engine is in `phase`; the engine's pid and folder."""
    front = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FRONT), phase], stdout=subprocess.PIPE, text=True
    )
    pid, folder = front.stdout.readline().split(maxsplit=1)
    if phase != "starting":
        assert front.stdout.readline() == "there\n"
    return front, int(pid), Path(folder.strip())


class TestKills:
    """`kill -9`, at every phase of an engine's life."""

    @pytest.mark.parametrize(
        "phase",
        [*(pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES[:-1]), PHASES[-1]],
    )
    def test_of_the_front(self, slow, phase):
        slow(phase)
        front, engine, _ = start_front(phase)
        with front:
            front.kill()
            wait_until_gone(front.pid, engine)

    @pytest.mark.parametrize(
        "start",
        [
            (
                "from toolkit_lm.engine.process.launch import EngineProcess as Process; process "
                "= Process()"
            ),
            "from toolkit_lm_executor_mp.local import make_folder; from "
            "toolkit_lm_executor_mp.process import WorkerProcess as Process\n"
            "process = Process(0, 1, make_folder(), bytes(32)); process.folder = ''",
        ],
        ids=["engine", "rank"],
    )
    def test_of_the_front_while_an_import_holds_the_interpreter(self, tmp_path, start):
        """On a machine that reads a large library from a slow disk, no thread of Python's runs for
        seconds."""
        (tmp_path / "tmp").mkdir()
        mark = tmp_path / "holds"
        (tmp_path / "torch.py").write_text(
            f"import ctypes, pathlib\npathlib.Path({str(mark)!r}).touch()\n"
            "ctypes.PyDLL(None).sleep(60)\n"
        )
        code = (
            f"import sys, time; sys.path.insert(0, {str(tmp_path)!r})\n{start}\n"
            "print(process.pid, flush=True); time.sleep(60)"
        )
        environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environ
        ) as front:
            pid = int(front.stdout.readline())
            end = time.monotonic() + 30
            while not mark.exists() and time.monotonic() < end:
                time.sleep(0.02)
            assert mark.exists()
            front.kill()
            wait_until_gone(pid)
        end = time.monotonic() + 30
        while os.listdir(tmp_path / "tmp") and time.monotonic() < end:
            time.sleep(0.02)
        assert os.listdir(tmp_path / "tmp") == []

    @pytest.mark.slow
    def test_of_a_forked_front_when_the_socket_folder_is_somebody_elses(self, sockets):
        code = f"""
            import os, time
            from toolkit_lm import LLM
            llm = LLM(**{SMALL!r}, engine_process=True)
            # It holds the lifeline open.
            fork = os.fork()
            if fork:
                process = llm.engine.client.process
                print(process.pid, fork, process.folder, flush=True)
            time.sleep(60)
        """
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
        ) as front:
            engine, fork, folder = front.stdout.readline().split()
            os.mkdir(folder)
            front.kill()
            wait_until_gone(front.pid, int(engine))
            os.kill(int(fork), signal.SIGKILL)
        # Fails where it was deleted.
        os.rmdir(folder)

    def test_a_closed_front_leaves_a_folder_that_is_somebody_elses(self):
        with LLM(**SMALL, engine_process=True) as llm:
            folder = llm.engine.client.process.folder
            folder.mkdir()
        assert folder.is_dir()
        folder.rmdir()

    @pytest.mark.parametrize(
        "phase",
        [*(pytest.param(phase, marks=pytest.mark.slow) for phase in PHASES[:-1]), PHASES[-1]],
    )
    def test_of_the_engine(self, slow, phase):
        slow(phase)
        llm = AsyncLLM(VllmConfig.make(**SMALL), wait=False)
        client = llm.engine.client

        async def body():
            asked = asyncio.create_task(ask(llm, GREEDY.replace(max_tokens=100)))
            if phase == "serving":
                await llm.wait_ready()
                await asyncio.sleep(0.3)
            elif phase != "starting":
                while llm.health().reason != phase:
                    await asyncio.sleep(0.01)
            os.kill(client.process.pid, signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(
                EngineDeadError, match="killed by SIGKILL; perhaps the machine ran out of memory"
            ):
                await asked
            assert time.monotonic() - start < 8
            assert llm.health().status == "dead" and (
                phase in ("serving", "starting") or phase in llm.health().reason
            )
            await llm.abort("any")
            await llm.aclose()

        asyncio.run(asyncio.wait_for(body(), 60))
        wait_until_gone(client.process.pid)

    def test_an_idle_engines_death_is_noticed(self):
        async def body():
            async with AsyncLLM(VllmConfig.make(**SMALL)) as llm:
                assert llm.health() == ("ready", "")
                os.kill(llm.engine.client.process.pid, signal.SIGKILL)
                await until(lambda: llm.health().status == "dead")
                assert "SIGKILL" in llm.health().reason
                assert llm.health().reason == str(llm.error)
                with pytest.raises(
                    EngineDeadError,
                    match=r"^the engine has died: the engine process \d+ has died: it was killed",
                ):
                    await ask(llm)

        asyncio.run(body())

    def test_the_terminals_signals_do_not_reach_the_engine(self):
        async def body():
            async with AsyncLLM(VllmConfig.make(**SMALL)) as llm:
                for number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(llm.engine.client.process.pid, number)
                assert len((await ask(llm)).token_ids) == 12

        asyncio.run(body())


BROKEN_TORCH = """
    import sys

    print("a word before", file=sys.stderr)
    raise ImportError("libnone.so: cannot open shared object file")
"""


class TestLastWords:
    """The stderr of an engine process that died is in the error, and on the terminal."""

    def test_while_importing(self, tmp_path, monkeypatch, capfd):
        (tmp_path / "torch.py").write_text(textwrap.dedent(BROKEN_TORCH))
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(EngineDeadError) as caught:
            AsyncLLM(VllmConfig.make(**SMALL))
        text = str(caught.value)
        note = caught.value.__notes__[0]
        assert re.search(r"process \d+ has died while importing: it ended with exit code 1\b", text)
        assert (
            text.endswith(": ImportError: libnone.so: cannot open shared object file")
            and "\n" not in text
        )
        assert "a word before\nTraceback" in note and "torch.py" in note
        assert note.endswith(capfd.readouterr().err.strip())

    @pytest.mark.parametrize(
        ("phase", "how", "words"),
        [
            ("printing", "it ended with exit code 7", "ValueError: no more\nof that"),
            pytest.param(
                "aborting",
                "it was killed by SIGABRT",
                "Fatal Python error: Aborted",
                marks=pytest.mark.slow,
            ),
            pytest.param("silent", "it ended with exit code 7", None, marks=pytest.mark.slow),
            pytest.param(
                "talking", "it ended with exit code 7", "y" * 500 + "...", marks=pytest.mark.slow
            ),
        ],
    )
    def test_while_serving(self, slow, capfd, phase, how, words):
        slow(phase)
        with LLM(**SMALL, engine_process=True) as llm:
            pid = llm.engine.client.process.pid
            with pytest.raises(EngineDeadError) as caught:
                llm.generate("Once", GREEDY, use_tqdm=False)
        said = f". The last that it wrote to stderr: {words}" if words else "."
        assert str(caught.value) == f"the engine process {pid} has died: {how}{said}"
        assert sum(map(len, getattr(caught.value, "__notes__", []))) < 10_000
        err = capfd.readouterr().err
        assert words is None or words[:500] in err
        if phase == "talking":
            assert err.count("y") == 1_000_000

    @pytest.mark.slow
    def test_a_kill_is_not_blamed_on_what_was_written_before(self, slow):
        slow("writing")

        async def body():
            async with AsyncLLM(VllmConfig.make(**SMALL)) as llm:
                await ask(llm)
                os.kill(llm.engine.client.process.pid, signal.SIGKILL)
                with pytest.raises(
                    EngineDeadError,
                    match=r"killed by SIGKILL; perhaps the machine ran out of memory\.$",
                ):
                    await ask(llm)

        asyncio.run(body())

    @pytest.mark.slow
    def test_it_is_written_as_it_comes_and_a_closed_terminal_harms_nobody(self, slow):
        slow("writing")
        code = f"""
            import os, sys
            from toolkit_lm import LLM, SamplingParams
            llm = LLM(**{SMALL!r}, engine_process=True)
            llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
            sys.stdin.readline()
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            [output] = llm.generate("Once", params, use_tqdm=False)
            print(len(output.outputs[0].token_ids))
        """
        front = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(
            front, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr.readline() == "a step\n"
            process.stderr.close()
            process.stdin.write("\n")
            process.stdin.close()
            assert process.stdout.read() == "2\n"


class TestRestart:
    def test_a_dead_engine_is_started_anew(self):
        async def body():
            async with AsyncLLM(VllmConfig.make(**SMALL, restart_engine=1)) as llm:
                expected = (await ask(llm)).token_ids
                # It answers nothing before it is killed.
                os.kill(llm.engine.client.process.pid, signal.SIGSTOP)
                lost = asyncio.create_task(ask(llm, GREEDY.replace(max_tokens=200)))
                await asyncio.sleep(0.01)
                os.kill(llm.engine.client.process.pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await lost
                assert llm.health().status == "restarting" and llm.error is None
                assert (await ask(llm)).token_ids == expected
                assert llm.health().status == "ready"
                os.kill(llm.engine.client.process.pid, signal.SIGKILL)
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    await ask(llm)
                assert llm.health().status == "dead"

        asyncio.run(body())


@pytest.mark.parametrize("asked", [None, "64"])
def test_it_keeps_few_kernels_and_its_threads_sleep_soon(monkeypatch, asked):
    """Who sets the variable has the last word."""
    if asked is not None:
        monkeypatch.setenv("LRU_CACHE_CAPACITY", asked)
    process = EngineProcess()
    environ: dict[str, str] = {}
    try:
        # The system shows none while it replaces the forked process.
        while not environ:
            environ = psutil.Process(process.pid).environ()
    finally:
        process.end()
    assert (environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], environ["LRU_CACHE_CAPACITY"]) == (
        "256",
        asked or "256",
    )
    assert environ["GOMP_SPINCOUNT"] == "4000"


class TestStall:
    def test_it_shows_and_the_stacks_are_dumped(self, slow, capfd):
        slow("serving")
        written = []

        def told() -> str:
            written.append(capfd.readouterr().err)
            return "".join(written)

        async def body():
            async with AsyncLLM(VllmConfig.make(**SMALL, step_timeout=0.5)) as llm:
                asked = asyncio.create_task(ask(llm, GREEDY.replace(max_tokens=100)))
                while llm.health().status != "stalled":
                    await asyncio.sleep(0.05)
                await until(lambda: "slow_plugin_target.py" in told())
                start = time.monotonic()
            assert time.monotonic() - start < 8
            with pytest.raises(EngineDeadError, match="shut down"):
                await asked

        asyncio.run(asyncio.wait_for(body(), 60))

    def test_a_deadline_holds_all_the_same(self):
        with LLMEngine(VllmConfig.make(**SMALL, engine_process=True)) as engine:
            process = psutil.Process(engine.client.process.pid)
            process.suspend()
            engine.add_request("late", "Once upon a time", GREEDY, timeout=0.1)
            engine.add_request("other", "Once upon a time", GREEDY)
            done = finished(engine, 1)
            process.resume()
            assert done | finished(engine, 1) == {
                "late": ("timeout", 0),
                "other": ("length", GREEDY.max_tokens),
            }


def finished(engine: LLMEngine, number: int) -> dict[str, tuple[str | None, int]]:
    """Reason of the end and number of tokens by request, once `number` have ended."""
    done: dict[str, tuple[str | None, int]] = {}
    end = time.monotonic() + 60
    while len(done) < number:
        assert time.monotonic() < end
        for output in engine.step():
            if output.finished:
                done[output.request_id] = (
                    output.outputs[0].finish_reason,
                    len(output.outputs[0].token_ids),
                )
    return done
