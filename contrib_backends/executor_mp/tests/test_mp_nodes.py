"""Ranks on two nodes: process groups that meet over TCP, and two network namespaces where they can
be made."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import psutil
import pytest
from ports import free_port
from processes import wait_until_gone
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, EngineDeadError, PluginError, UnsupportedError
from toolkit_lm.executor import make_executor
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_devkit.executor import write_llama
from toolkit_lm_executor_mp import nodes as nodes_module, wire
from toolkit_lm_executor_mp.network import versions

OPTIONS = {
    "device": "cpu",
    "block_size": 4,
    "max_model_len": 64,
    "num_kv_blocks": 64,
    "start_timeout": 60,
    "node_timeout": 60,
}
SOON = 30
"""Seconds: many times what it takes on a busy machine, and less than what is waited for a start, or
for a sign of life."""
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PLUGINS = "cli,decoder,executor_mp,loaders,renderer_hf,sdpa"
KEY = "a secret of the two nodes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("TOOLKIT_LM_LAUNCH_KEY", KEY)
    monkeypatch.setenv("TOOLKIT_LM_PLUGINS", PLUGINS)


@pytest.fixture
def master():
    return f"127.0.0.1:{free_port()}"


def worker(
    master: str, node_rank: int = 1, *options: str, prefix: Sequence[str] = (), **environ: str
) -> subprocess.Popen[str]:
    """`toolkit worker`, in a process group of its own."""
    code = "import sys; from toolkit_lm_cli import main; sys.exit(main())"
    words = [
        "worker",
        "--master",
        master,
        "--node-rank",
        str(node_rank),
        "--start-timeout",
        "60",
        "--node-timeout",
        "60",
        *options,
    ]
    command = [*prefix, sys.executable, "-c", code, *words]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    )


@contextmanager
def working(*arguments, **environ):
    """A node of workers, with what it has written to stderr at the end. Nothing of it lives soon
    after it has ended, or should have."""
    process = worker(*arguments, **environ)
    process.words = ""
    seen: set[psutil.Process] = set()

    def end(timeout: float = SOON) -> int:
        """Its exit code."""
        if process.poll() is None:
            seen.update(psutil.Process(process.pid).children(recursive=True))
        process.words += process.communicate(timeout=timeout)[1] or ""
        _, alive = psutil.wait_procs(seen, SOON)
        assert alive == []
        return process.returncode

    process.end = end
    try:
        yield process
        end()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def nodes(folder, master: str, sizes: tuple[int, int] = (2, 1), **options) -> LLM:
    return LLM(
        str(folder),
        tensor_parallel_size=sizes[0],
        pipeline_parallel_size=sizes[1],
        **({"nodes": 2, "master": master} | OPTIONS | options),
    )


def prompt(length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(3 * k) % 250 + 3 for k in range(1, length + 1)]}


PROMPTS = [prompt(length) for length in (5, 13, 9)]


def tokens(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        return tokens(llm)


@pytest.mark.parametrize("sizes", [(1, 2), pytest.param((2, 1), marks=pytest.mark.nightly)])
def test_tokens_are_those_of_one_worker(folder, master, expected, sizes):
    with working(master) as process:
        with nodes(folder, master, sizes) as llm:
            assert tokens(llm) == expected
        assert process.end() == 0, process.words
    assert "node 1 has joined" in process.words


DOING = {
    "import": "while importing",
    "load": "while loading the model",
    "warm_up": "while warming up",
    "step": r"in step \d+",
}


@pytest.mark.parametrize(
    ("rank", "when"),
    # Each node, before the ranks are connected and after; at night at each moment.
    [(0, "import"), (1, "step")]
    + [
        pytest.param(rank, when, marks=pytest.mark.nightly)
        for rank in (0, 1)
        for when in DOING
        if (rank, when) not in ((0, "import"), (1, "step"))
    ],
)
def test_a_worker_that_dies(folder, master, sabotage, rank, when):
    """Whichever machine it is on, the error says who and how, and all of both nodes end."""
    sabotage(rank, when, "kill")
    where = "" if rank == 0 else " on node 1"
    with working(master) as process:
        start = time.monotonic()
        message = rf"the worker of rank {rank} .* has died .*killed by SIGKILL"
        with pytest.raises(EngineDeadError, match=message) as caught, nodes(folder, master) as llm:
            start = time.monotonic()
            llm.generate([prompt(13)], PARAMS, use_tqdm=False)
        assert re.search(DOING[when], str(caught.value))
        assert where in str(caught.value)
        assert (socket.gethostname() in str(caught.value)) == (rank == 1)
        if when == "step":
            assert time.monotonic() - start < SOON
        assert process.end() == 1
    assert f"the worker of rank {rank}" in process.words


@pytest.mark.slow
def test_failures_and_pauses_of_a_machine(folder, master, sabotage, expected):
    """A failure names the machine, and other requests go on. So do all after a pause, which models
    a machine that is migrated or has a slow disk."""
    sabotage(1, "step", "raise")
    with working(master) as process:
        with nodes(folder, master) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [output.outputs[0].finish_reason for output in outputs] == [
                "length",
                "error",
                "length",
            ]
            assert (
                f"no prompt of thirteen tokens (on rank 1 of node 1 ({socket.gethostname()}) in "
                "step " in outputs[1].error
            )
            assert [list(outputs[index].outputs[0].token_ids) for index in (0, 2)] == [
                expected[0],
                expected[2],
            ]
            node = psutil.Process(process.pid)
            for paused in (node, *node.children()):
                paused.suspend()
                time.sleep(6)
                paused.resume()
                assert tokens(llm, PROMPTS[::2]) == expected[::2]
        assert process.end() == 0, process.words


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_ends(folder, master, how):
    with working(master) as process, nodes(folder, master) as llm:
        found = psutil.Process(process.pid).children(recursive=True)
        assert len(found) == 1
        process.send_signal(how)
        start = time.monotonic()
        message = (
            "told to end by SIGTERM"
            if how == signal.SIGTERM
            else rf"node 1 \({socket.gethostname()}, process \d+\) has gone"
        )
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=message):
                for _ in range(1000):
                    llm.generate([prompt(5)], PARAMS, use_tqdm=False)
        assert time.monotonic() - start < SOON
        wait_until_gone(*found, *llm.engine.client.core.executor.pids)


def test_a_node_that_is_killed_while_its_rank_loads(folder, master, sabotage):
    """Its rank ends with it, and the engine does not wait for start_timeout."""
    struck = sabotage(1, "load", "hang")
    with working(master) as process, ThreadPoolExecutor(1) as thread:
        starting = thread.submit(nodes, folder, master)
        until(struck.exists)
        [rank] = psutil.Process(process.pid).children()
        process.kill()
        gone = (
            rf"node 1 \({socket.gethostname()}, process {process.pid}\) has gone while loading "
            r"the model"
        )
        with pytest.raises(EngineDeadError, match=gone):
            starting.result(SOON)
        _, alive = psutil.wait_procs([rank], SOON)
        assert alive == []


@pytest.mark.parametrize("delay", [None, pytest.param(1.0, marks=pytest.mark.nightly)])
def test_an_engine_that_is_killed(folder, master, delay):
    """While it starts, and when it is ready."""
    options = {"tensor_parallel_size": 2, "nodes": 2, "master": master, **OPTIONS}
    code = (
        f"import sys; from toolkit_lm import LLM; llm = LLM({str(folder)!r}, **{options!r}); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    with working(master) as process:
        front = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        until(lambda: psutil.Process(process.pid).children())
        if delay is None:
            assert front.stdout.readline() == b"ready\n"
        else:
            time.sleep(delay)
        found = psutil.Process(front.pid).children(recursive=True)
        assert found
        front.kill()
        front.communicate()
        assert process.end() == 1
        _, alive = psutil.wait_procs(found, SOON)
        assert alive == []
    assert "the connection to node 0" in process.words


def until(holds) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


# Starts that fail


def test_a_master_that_is_not_there(master):
    with working(master, 1, "--start-timeout", "1") as process:
        assert process.end(30) == 1
    assert (
        f"node 1 could not reach node 0 at {master} within 1 s: nobody answers there"
        in process.words
    )


@pytest.mark.parametrize("engine_process", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_node_that_never_comes(folder, master, engine_process):
    with pytest.raises(
        EngineDeadError,
        match=rf"node 1 of 2 did not come to {master} within start_timeout: `toolkit worker` "
        r"must run",
    ):
        # An engine process has to start within it, too.
        seconds = 20 if engine_process else 4
        nodes(folder, master, start_timeout=seconds, engine_process=engine_process)


def test_a_node_of_another_key(folder, master):
    with working(master, TOOLKIT_LM_LAUNCH_KEY="another secret of somebody") as process:
        with pytest.raises(
            EngineDeadError, match="connections were refused: who made them has another launch key"
        ):
            nodes(folder, master, start_timeout=12)
        assert process.end(60) == 1
    assert "closes the connection: it has another launch key" in process.words


@pytest.mark.parametrize("forged", ["engine", "node"])
def test_who_cannot_prove_the_key_is_refused(folder, master, monkeypatch, forged):
    """Should it have come through the encryption."""
    prove = wire.prove
    monkeypatch.setattr(
        wire,
        "prove",
        lambda key, who, number, nonce: prove(
            b"guessed" if who == forged and number else key, who, number, nonce
        ),
    )
    with working(master) as process:
        who = "calls itself node 1" if forged == "node" else f"answers at {master}"
        with pytest.raises(EngineDeadError, match=f"who {who} does not know the key of the launch"):
            nodes(folder, master)
        assert process.end(60) == 1


def test_a_node_rank_that_is_not_there(folder, master):
    with working(master, 2) as process:
        with pytest.raises(
            ConfigError,
            match=r"node 2 \(.*\) is not among the 2 nodes: its node_rank must be from 1 to 1",
        ):
            nodes(folder, master)
        assert process.end() == 1
    assert "is not among the 2 nodes" in process.words


def test_two_nodes_of_one_rank(folder, master):
    with working(master) as one, working(master) as other:
        with pytest.raises(
            ConfigError,
            match=r"two machines have the same node_rank: node 1 \(.*\) and node 1 \(",
        ):
            nodes(folder, master, (4, 1), nodes=4)
        assert [one.end(), other.end()] == [1, 1]


def test_other_versions(folder, master, monkeypatch):
    monkeypatch.setattr(nodes_module, "versions", lambda: {**versions(), "torch": "1.0"})
    with working(master) as process:
        with pytest.raises(
            ConfigError,
            match=r"node 1 \(.*\) has other versions than node 0 .*: torch 1\.0 here, .* there",
        ):
            nodes(folder, master)
        assert process.end() == 1


def test_other_plugins(folder, master, sabotage, tmp_path):
    plugins = Plugins.load()
    plugins.fingerprint(installed=True)
    config = resolve(
        VllmConfig.make(
            model=str(folder), tensor_parallel_size=2, nodes=2, master=master, **OPTIONS
        ),
        plugins,
    )
    (tmp_path / "other").mkdir()
    shutil.copytree(
        tmp_path / "toolkit_lm_saboteur-1.0.dist-info",
        tmp_path / "other" / "toolkit_lm_saboteur-1.0.dist-info",
    )
    text = (tmp_path / "toolkit_lm_saboteur.py").read_text()
    (tmp_path / "other" / "toolkit_lm_saboteur.py").write_text(text + "# changed\n")
    with working(
        master, PYTHONPATH=os.pathsep.join([str(tmp_path / "other"), *sys.path])
    ) as process:
        with pytest.raises(
            PluginError,
            match=r"other plugins than its engine .*\nplugin 'saboteur': .* here, .* there.*on "
            r"rank 1 of node 1",
        ):
            make_executor(config, plugins).load()
        assert process.end() == 1
    assert "plugin 'saboteur'" in process.words


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"nodes": 3},
            (
                r"2 ranks \(tensor_parallel_size 2 x pipeline_parallel_size 1\) cannot be shared "
                r"evenly by nodes=3"
            ),
        ),
        ({"master": None}, "several nodes need master=.HOST:PORT"),
        ({"master": "nowhere"}, "'nowhere' is no HOST:PORT"),
        ({"master": "192.0.2.7:29500"}, r"node 0 cannot listen at 192\.0\.2\.7:29500 \(master\)"),
        ({"node_rank": 1}, "node 1 holds no engine: run `toolkit worker --master"),
        ({"nodes": 1}, "are for several machines: give nodes=2"),
        ({"launch_key_file": "/nowhere"}, "'/nowhere' .launch_key_file. cannot be read"),
    ],
)
def test_options_that_do_not_fit(folder, master, options, message):
    with pytest.raises(ConfigError, match=message):
        nodes(folder, **({"master": master} | options))


def test_an_executor_for_one_machine(folder, master):
    with pytest.raises(
        UnsupportedError, match=r"in_process.* 2 nodes are needed, and it supports 1"
    ):
        nodes(folder, master, executor="in_process")


def test_a_port_in_use(folder):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        master = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"node 0 cannot listen at {master} .master.: Address already in use"
        ):
            nodes(folder, master)


@pytest.mark.parametrize("text", ["", "short"])
def test_a_key_that_is_none(folder, master, monkeypatch, tmp_path, text):
    monkeypatch.delenv("TOOLKIT_LM_LAUNCH_KEY")
    with pytest.raises(
        ConfigError, match="several nodes need a secret that they share: give launch_key_file"
    ):
        nodes(folder, master)
    (tmp_path / "key").write_text(text)
    with pytest.raises(ConfigError, match=f"has {len(text)} characters: it needs 16"):
        nodes(folder, master, launch_key_file=str(tmp_path / "key"))


# Two network namespaces


@pytest.fixture
def namespaces():
    """The names of two, with the addresses 10.199.77.1 and .2, joined by a cable."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip")
    names = [f"toolkit{os.getpid()}-{number}" for number in (1, 2)]
    ends = [f"tk{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        commands = [f"ip link add {ends[0]} type veth peer name {ends[1]}"]
        for name, end, number in zip(names, ends, (1, 2), strict=True):
            commands += [
                f"ip link set {end} netns {name}",
                f"ip -n {name} addr add 10.199.77.{number}/24 dev {end}",
                f"ip -n {name} link set {end} up",
                f"ip -n {name} link set lo up",
            ]
        for command in commands:
            made = subprocess.run(command.split(), capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network between namespaces here: {command}: {made.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.nightly)])
def test_tokens_over_two_network_namespaces(folder, namespaces, expected, sizes):
    """Nothing is reached on the loopback interface: each machine has its own."""
    master = "10.199.77.1:29500"
    options = {
        "tensor_parallel_size": sizes[0],
        "pipeline_parallel_size": sizes[1],
        "nodes": 2,
        "master": master,
        **OPTIONS,
    }
    code = (
        "import json, sys; from toolkit_lm import LLM, SamplingParams\n"
        f"with LLM({str(folder)!r}, **{options!r}) as llm:\n"
        f"    params = SamplingParams(temperature=0, max_tokens={PARAMS.max_tokens}, "
        "ignore_eos=True)\n"
        f"    outputs = llm.generate({PROMPTS!r}, params, use_tqdm=False)\n"
        "    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with working(master, prefix=["ip", "netns", "exec", namespaces[1]]) as process:
        command = ["ip", "netns", "exec", namespaces[0], sys.executable, "-c", code]
        front = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100)
        assert front.returncode == 0, front.stderr
        assert json.loads(front.stdout) == expected
        assert process.end() == 0, process.words


def test_a_machine_without_an_engine_imports_no_torch():
    """It would take seconds to leave it, on a busy machine, when a rank has died."""
    code = "import sys, toolkit_lm_executor_mp.node; sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_a_node_that_does_not_come_back_is_lost(folder, master):
    with (
        working(master, 1, "--node-timeout", "2") as process,
        nodes(folder, master, node_timeout=2) as llm,
    ):
        node = psutil.Process(process.pid)
        node.suspend()
        try:
            with pytest.raises(EngineDeadError, match=r"has gone .* with rank 1"):
                llm.generate([prompt(13)], PARAMS, use_tqdm=False)
        finally:
            node.resume()
        assert process.end() == 1
