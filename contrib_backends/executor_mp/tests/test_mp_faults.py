"""Faults: workers that die at any moment, requests that one rank fails on, and unsupported
configs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import living
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import (
    ConfigError,
    EngineDeadError,
    PluginError,
    ToolkitError,
    UnsupportedError,
)
from toolkit_lm.executor import make_executor
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.resolution import resolve
from toolkit_lm_devkit.executor import write_llama
from toolkit_lm_executor_mp import executor, link, wire
from toolkit_lm_executor_mp.process import WorkerProcess

OPTIONS = {"device": "cpu", "block_size": 4, "max_model_len": 64, "num_kv_blocks": 64}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SIZES = [(1, 2), *(pytest.param(one, marks=pytest.mark.nightly) for one in ((2, 1), (2, 2)))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def nothing_is_left(monkeypatch):
    """Soon after the test, no worker lives, and the temporary folder is empty."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    # The path of a socket must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield
        end = time.monotonic() + SOON
        while (left := workers() - before) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left
        assert os.listdir(temporary) == []
        monkeypatch.setattr(tempfile, "tempdir", None)


SOON = 30
"""Seconds: many times what it takes on a busy machine, and less than the ranks' patience."""
OTHERS: set[int] = set()
"""Processes that other tests of this process have left to live, such as those that compile
grammars."""


@pytest.fixture(autouse=True)
def others():
    OTHERS.clear()
    OTHERS.update(workers())


def workers() -> set[int]:
    """Processes of this one, and of its engine process, that live."""
    found = psutil.Process().children(recursive=True)
    return {process.pid for process in living(found)} - OTHERS


def until(holds: Callable[[], bool]) -> None:
    """Waits until it holds, within SOON."""
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def prompt(length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(3 * k) % 250 + 3 for k in range(1, length + 1)]}


def ranks(folder, sizes: tuple[int, int], **options) -> LLM:
    return LLM(
        str(folder),
        tensor_parallel_size=sizes[0],
        pipeline_parallel_size=sizes[1],
        **OPTIONS,
        **options,
    )


DOING = {
    "import": "while importing",
    "load": "while loading the model",
    "warm_up": "while warming up",
}


@pytest.mark.parametrize(
    ("rank", "when"),
    # Each rank; at night at each moment. `test_who_does_not_know_the_key_is_refused` has one that
    # dies while it imports.
    [(1, "load"), (0, "warm_up")]
    + [
        pytest.param(*one, marks=pytest.mark.nightly)
        for one in ((0, "import"), (1, "import"), (0, "load"), (1, "warm_up"))
    ],
)
def test_a_worker_that_dies_at_the_start(folder, sabotage, nothing_is_left, rank, when):
    sabotage(rank, when, "kill")
    start = (
        rf"the worker of rank {rank} \(process \d+\) has died {DOING[when]}: "
        r"it was killed by SIGKILL; "
        r"perhaps the machine ran out of memory"
    )
    with pytest.raises(EngineDeadError, match=start):
        ranks(folder, (2, 1))


@pytest.mark.parametrize(
    ("rank", "sizes"),
    # Each rank, and each way to share the model; at night both of all.
    [(0, (2, 1)), (1, (1, 2))]
    + [
        pytest.param(*one, marks=pytest.mark.nightly)
        for one in ((1, (2, 1)), (0, (1, 2)), (0, (2, 2)), (1, (2, 2)))
    ],
)
def test_a_worker_that_dies_in_a_step(folder, sabotage, nothing_is_left, sizes, rank):
    sabotage(rank, "step", "kill")
    with ranks(folder, sizes) as llm:
        assert len(llm.generate([prompt(5)], PARAMS, use_tqdm=False)) == 1
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(
                EngineDeadError,
                match=rf"the worker of rank {rank} \(process \d+\) has died in step \d+: it was "
                r"killed",
            ):
                llm.generate([prompt(5), prompt(13)], PARAMS, use_tqdm=False)
        assert time.monotonic() - start < SOON
        while workers() and time.monotonic() - start < SOON:
            time.sleep(0.05)
        assert workers() == set()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("abort", "SIGABRT. The last that it wrote to stderr: Fatal Python error: Aborted"),
        ("leave", "the worker had enough"),
    ],
)
def test_the_last_words_of_a_worker(folder, sabotage, nothing_is_left, how, words):
    sabotage(1, "step", how)
    with ranks(folder, (2, 1)) as llm, pytest.raises(EngineDeadError) as caught:
        llm.generate([prompt(13)], PARAMS, use_tqdm=False)
    assert words in str(caught.value)
    assert "strike" in "".join(caught.value.__notes__), "there is no traceback"


def test_a_worker_that_hangs_after_another_has_failed(
    folder, sabotage, nothing_is_left, monkeypatch
):
    monkeypatch.setattr(link, "PATIENCE", 1.0)
    sabotage(0, "step", "hang")
    with ranks(folder, (2, 1)) as llm:
        core = llm.engine.client.core
        # Rank 1 fails, since nobody knows the sequence; rank 0 is asleep.
        from toolkit_lm.messages import StepPlan
        from toolkit_lm_devkit.executor import new, row

        plan = StepPlan(new=[new(0, [5] * 13)], scheduled=[row(99, 1)])
        with pytest.raises(
            EngineDeadError, match="rank 0 had not answered 1 s after another had failed, in step 1"
        ) as caught:
            core.executor.execute(plan).result(30)
    assert "on rank 1: Traceback" in caught.value.__notes__[0]


def step(llm):
    """Runs a step with a prompt of thirteen tokens. Returns its result within 20 s."""
    from toolkit_lm.messages import StepPlan
    from toolkit_lm_devkit.executor import new, row

    return llm.engine.client.core.executor.execute(
        StepPlan(new=[new(0, [5] * 13)], scheduled=[row(0, 13)])
    ).result(20)


def test_a_failed_step_leaves_no_thread_that_spins(folder, sabotage, nothing_is_left, monkeypatch):
    monkeypatch.setattr(link, "PATIENCE", 2)
    sabotage(1, "step", "raise")
    with ranks(folder, (2, 1)) as llm:
        with pytest.raises(ToolkitError, match="no prompt of thirteen tokens"):
            step(llm)
        # The deadline of the call passes, at which its thread span.
        time.sleep(2.1)
        start = time.process_time()
        time.sleep(1)
        assert time.process_time() - start < 0.3


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="no real-time signals here")
def test_a_worker_that_a_signal_without_a_name_ends(tmp_path, monkeypatch):
    """A process in the place of a worker's, without an engine."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    process = WorkerProcess(1, 1, tmp_path, b"key")
    os.kill(process.pid, signal.SIGRTMIN + 3)
    until(lambda: not process.is_alive)
    assert f"it was killed by signal {signal.SIGRTMIN + 3}." in str(process.death("in step 7"))


def test_reports_that_cannot_be_read_end_the_workers(folder, nothing_is_left, monkeypatch):
    def broken(report):
        raise ValueError("no report")

    with ranks(folder, (2, 1)) as llm:
        monkeypatch.setattr(wire, "decode_report", broken)
        for _ in range(2):
            with pytest.raises(
                EngineDeadError, match=r"the workers are ended: .*ValueError\('no report'\)"
            ):
                step(llm)


def test_garbage_may_be_collected_in_the_thread_that_takes_reports(folder, nothing_is_left):
    with ranks(folder, (2, 1)) as llm:
        held = llm.engine.client.core.executor.link
        held.call(wire.Describe(), "in a test").future.add_done_callback(lambda _: held.end())
        held._thread.join(20)
        assert not held._thread.is_alive()
        assert [process.is_alive for process in held.processes] == [False, False]


@pytest.mark.parametrize("is_told", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_engine_that_is_killed_while_it_connects_anew_leaves_no_folder(
    folder, sabotage, nothing_is_left, is_told
):
    sabotage(1, "step", "raise")
    code = (
        "import os; from toolkit_lm import LLM; from toolkit_lm_executor_mp import link, wire; "
        "call = link.Link.call\n"
        "def killed(self, command, *rest):\n"
        "    last = isinstance(command, wire.Connect) and self._num_calls > 1\n"
        f"    result = call(self, command, *rest) if {is_told} or not last else None\n"
        "    if last: os.kill(os.getpid(), 9)\n"
        "    return result\n"
        "link.Link.call = killed\n"
        f"LLM({str(folder)!r}, tensor_parallel_size=2, **{OPTIONS!r}).generate([{prompt(13)!r}, "
        f"{prompt(5)!r}], use_tqdm=False)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=100).returncode
        == -signal.SIGKILL
    )


@pytest.mark.parametrize("sizes", SIZES)
def test_a_request_that_one_rank_fails_on_ends_alone(folder, sabotage, nothing_is_left, sizes):
    sabotage(1, "step", "raise")
    prompts = [prompt(5), prompt(13), prompt(9)]
    with LLM(str(folder), **OPTIONS) as llm:
        expected = llm.generate(prompts, PARAMS, use_tqdm=False)
    with ranks(folder, sizes) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            assert [output.outputs[0].finish_reason for output in outputs] == [
                "length",
                "error",
                "length",
            ]
            assert (
                "RuntimeError: no prompt of thirteen tokens (on rank 1 in step " in outputs[1].error
            )
            assert "saboteur" in outputs[1].error, "the plugin is not named"
            for index in (0, 2):
                assert outputs[index].outputs[0].token_ids == expected[index].outputs[0].token_ids


@pytest.mark.slow
def test_an_engine_process_and_its_workers_end_together(
    folder, sabotage, nothing_is_left, monkeypatch
):
    """The front is told who has died, and goes on with the next engine. When all have ended, nobody
    need send a request to hear of it."""
    sabotage(1, "step", "kill")
    with ranks(folder, (2, 1), engine_process=True, restart_engine=2) as llm:

        def tokens(length):
            [output] = llm.generate([prompt(length)], PARAMS, use_tqdm=False)
            return output.outputs[0].token_ids

        expected = tokens(5)
        # Ctrl-C goes to all processes of a terminal: the workers go on.
        for pid in processes_of_ranks():
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
        assert tokens(5) == expected
        with pytest.raises(EngineDeadError, match="the worker of rank 1"):
            tokens(13)

        monkeypatch.delenv("SABOTAGE")
        llm.engine.restart()
        assert len(tokens(13)) == 8
        os.kill(processes_of_ranks()[1], signal.SIGKILL)
        end = time.monotonic() + SOON
        while workers() and time.monotonic() < end:
            time.sleep(0.05)
        assert workers() == set()
        with pytest.raises(
            EngineDeadError,
            match=r"the worker of rank 1 \(process \d+\) has died between steps: it was killed "
            r"by SIGKILL",
        ):
            tokens(5)

        llm.engine.restart()
        assert tokens(5) == expected
        found = [psutil.Process(pid) for pid in workers()]
        [engine] = [one for one in found if any(one.pid == other.ppid() for other in found)]
        engine.kill()
        with pytest.raises(
            EngineDeadError,
            match=rf"the engine process {engine.pid} has died: it was killed by SIGKILL",
        ):
            tokens(5)
        _, alive = psutil.wait_procs(found, SOON)
        assert (len(found), alive) == (3, [])


def processes_of_ranks() -> list[int]:
    """Of both ranks, in their order, whoever has started them."""
    found = {}
    for pid in workers():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        for rank in (0, 1):
            if b"worker %d " % rank in command:
                found[rank] = pid
    return [found[0], found[1]]


@pytest.mark.parametrize(
    ("delay", "engine_process"),
    # At night each moment of both.
    [
        (0.3, True),
        pytest.param(None, False, marks=pytest.mark.slow),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in ((0.3, False), (2.0, True), (2.0, False), (None, True))
        ),
    ],
)
def test_all_die_with_their_front(folder, nothing_is_left, engine_process, delay):
    """Killed at its start, while it imports and loads, and when it is ready."""
    code = (
        "import sys; from toolkit_lm import LLM; "
        f"llm = LLM({str(folder)!r}, tensor_parallel_size=2, engine_process={engine_process}, "
        f"**{OPTIONS!r}); print('ready', flush=True); "
        "sys.stdin.read()"
    )
    front = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    end = time.monotonic() + 60
    while (
        len(psutil.Process(front.pid).children(recursive=True)) < 2 + engine_process
        and time.monotonic() < end
    ):
        time.sleep(0.02)
    if delay is None:
        assert front.stdout.readline() == b"ready\n"
    else:
        time.sleep(delay)
    found = psutil.Process(front.pid).children(recursive=True)
    # While it imports, each has another that watches it.
    assert len(found) >= 2 + engine_process
    front.kill()
    front.communicate()
    _, alive = psutil.wait_procs(found, SOON)
    assert alive == []


def test_heads_that_do_not_divide(folder, nothing_is_left):
    """One error, of one rank."""
    with pytest.raises(
        ConfigError,
        match=r"cannot be split evenly over tensor_parallel_size=3 \(on rank \d while loading "
        r"the model\)\.",
    ):
        ranks(folder, (3, 1))


def test_more_stages_than_layers(folder, nothing_is_left, tmp_path):
    shorter = shutil.copytree(folder, tmp_path / "shorter")
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(
        ConfigError,
        match=r"the 1 layers of model\.layers cannot be cut into 2 stages: .* \(on rank \d while "
        r"loading",
    ):
        ranks(shorter, (1, 2))


def test_more_ranks_than_gpus(folder, monkeypatch):
    monkeypatch.setattr(executor.torch.cuda, "device_count", lambda: 1)
    config = VllmConfig.default(tensor_parallel_size=2, device="cuda")
    with pytest.raises(
        UnsupportedError,
        match="tensor_parallel_size 2 x pipeline_parallel_size 1 needs 2 GPUs, one per rank: "
        "there are 1",
    ):
        executor.MpExecutor(config, Plugins.load())


def test_a_gpu_by_its_number_is_refused():
    """Each worker would take the one of its own rank."""
    for size in (1, 2):
        config = VllmConfig.default(tensor_parallel_size=size, device="cuda:1")
        with pytest.raises(
            UnsupportedError,
            match=r"device 'cuda:1' is one device, and each worker takes its "
            r"own.*CUDA_VISIBLE_DEVICES",
        ):
            executor.MpExecutor(config, Plugins.load())


def test_plugins_from_code_that_workers_need_are_refused(folder):
    class Mine:
        name = "mine"

        @hookimpl
        def toolkit_register_models(self, models): ...

    with pytest.raises(
        PluginError,
        match=r"'mine'.* implements toolkit_register_models, which the workers need too",
    ):
        LLM(str(folder), tensor_parallel_size=2, plugins=[Mine()], **OPTIONS)


@pytest.mark.nightly
def test_workers_with_other_plugins_are_refused(folder, sabotage, nothing_is_left, tmp_path):
    plugins = Plugins.load()
    plugins.fingerprint(installed=True)
    with (tmp_path / "toolkit_lm_saboteur.py").open("a") as file:
        file.write("# changed\n")
    config = resolve(VllmConfig.make(model=str(folder), tensor_parallel_size=2, **OPTIONS), plugins)
    with pytest.raises(
        PluginError, match=r"other plugins than its engine .*\nplugin 'saboteur': .* here, .* there"
    ):
        make_executor(config, plugins).load()


@pytest.mark.parametrize("forged", ["engine", "worker"])
def test_who_does_not_know_the_key_is_refused(folder, nothing_is_left, monkeypatch, forged):
    """An engine that cannot prove itself is left by its workers; a worker that cannot ends the
    start."""
    prove = wire.prove
    if forged == "engine":
        monkeypatch.setattr(
            wire, "prove", lambda key, who, rank, nonce: prove(b"guessed", who, rank, nonce)
        )
        message = (
            "has died while importing: .*PermissionError: who answers at the engine's socket "
            "does not know the key"
        )
    else:
        monkeypatch.setattr(
            wire,
            "prove",
            lambda key, who, *rest: prove(b"guessed" if who == "worker" else key, who, *rest),
        )
        message = "who calls itself the worker of rank [01] does not know the key of the launch"
    with pytest.raises(EngineDeadError, match=message):
        ranks(folder, (2, 1))


def test_a_start_that_takes_too_long(folder, sabotage, nothing_is_left, monkeypatch):
    struck = sabotage(1, "load", "hang")
    answers = link.Link.answers

    def late(self, call, end):
        """As if the minute were over once the rank hangs."""
        if call.doing == DOING["load"]:
            until(struck.exists)
            end -= 60
        return answers(self, call, end)

    monkeypatch.setattr(link.Link, "answers", late)
    with pytest.raises(
        EngineDeadError,
        match=r"rank (0, )?1 were not ready within start_timeout: they got no further while "
        "loading the model",
    ):
        ranks(folder, (2, 1), start_timeout=60)


def test_a_temporary_folder_of_too_long_a_name(folder, tmp_path, monkeypatch):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(ConfigError, match="too long: a socket in it may have at most"):
        ranks(folder, (2, 1))
    assert list(long.iterdir()) == []
