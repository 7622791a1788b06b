"""Ranks that Ray places: what they compute, and what goes wrong."""

from __future__ import annotations

import asyncio
import os
import re
import time

import pytest
import ray
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, EngineDeadError, PluginError, UnsupportedError
from toolkit_lm.executor import make_executor
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_executor_ray.cluster import joined

OPTIONS = {
    "model": "tiny",
    "executor": "ray",
    "device": "cpu",
    "dtype": "float32",
    "num_kv_blocks": 64,
    "start_timeout": 60,
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["What is 7 plus 5?", "Tell me a story about a dog."]
SIZES = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2, "nodes": 2},
}
WORKER = "toolkit-lm worker"
"""Title of a worker process."""
ACTOR = "NodeActor"


def tokens(llm: LLM) -> list[list[int]]:
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]


def nothing_is_left(processes) -> None:
    """Soon no rank lives, and Ray has what it had."""
    end = time.monotonic() + 30
    while (
        processes(WORKER) or processes(ACTOR) or ray.available_resources().get("CPU") != 4
    ) and time.monotonic() < end:
        time.sleep(0.1)
    assert processes(WORKER) == processes(ACTOR) == []
    assert ray.available_resources()["CPU"] == 4


@pytest.fixture(scope="module")
def expected(cluster):
    with LLM(**OPTIONS | {"executor": "auto"}) as llm:
        return tokens(llm)


@pytest.mark.parametrize("size", ["pipeline", pytest.param("tensor", marks=pytest.mark.nightly)])
def test_tokens_are_those_of_one_worker(expected, processes, size):
    with LLM(**OPTIONS, **SIZES[size]) as llm:
        assert tokens(llm) == expected
        assert len(processes(WORKER)) == 2
        assert len(processes(ACTOR)) == SIZES[size].get("nodes", 1)
        assert ray.available_resources().get("CPU") == 2
    nothing_is_left(processes)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (WORKER, "the worker of rank . .* has died .*SIGKILL"),
        (ACTOR, "rank .: its Ray actor has died"),
    ],
)
def test_a_rank_is_killed(cluster, processes, word, told):
    with LLM(**OPTIONS, **SIZES["pipeline"]) as llm:
        processes(word)[-1].kill()
        start = time.monotonic()
        for _ in range(2):
            with pytest.raises(EngineDeadError, match=told) as caught:
                tokens(llm)
        assert time.monotonic() - start < 30
        assert caught.value.__notes__
    nothing_is_left(processes)


@pytest.mark.nightly
def test_an_engine_that_is_restarted_gets_other_ranks(cluster, expected, processes):
    address = {"executor_ray": {"address": cluster}}
    config = VllmConfig.make(
        **OPTIONS, **SIZES["tensor"], plugin_option=address, engine_process=True, restart_engine=1
    )

    async def body():
        async with AsyncLLM(config) as llm:

            async def ask(name):
                async for output in llm.generate(PROMPTS[0], PARAMS, request_id=name):
                    found = list(output.outputs[0].token_ids)
                return found

            assert await ask("before") == expected[0]
            before = {one.pid for one in processes(WORKER)}
            processes(WORKER)[0].kill()
            with pytest.raises(EngineDeadError, match="has died"):
                while True:
                    await ask("between")
            await llm.wait_ready()
            assert await ask("after") == expected[0]
            assert len(before | {one.pid for one in processes(WORKER)}) == 4

    asyncio.run(asyncio.wait_for(body(), 100))
    nothing_is_left(processes)


def test_too_few_resources(cluster, processes):
    """The error states the needed and the present resources, and a remedy."""
    options = {"executor_ray": {"placement_timeout": 1, "cpus": 3}}
    with pytest.raises(
        UnsupportedError,
        match=r"no room for 1 x 6 CPU .* have 4 CPU, and 4 CPU are free.*executor_ray\.cpus",
    ):
        LLM(**OPTIONS, **SIZES["tensor"], plugin_option=options)
    nothing_is_left(processes)


def test_nodes_that_must_be_apart(cluster):
    options = {"executor_ray": {"placement_timeout": 1, "strategy": "STRICT_SPREAD"}}
    with pytest.raises(UnsupportedError, match="strategy STRICT_SPREAD"):
        LLM(**OPTIONS, **SIZES["pipeline"], plugin_option=options)


def write_plugin(folder, text: str) -> None:
    info = folder / "toolkit_lm_there-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toolkit-lm-there\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolkit_lm]\nthere = toolkit_lm_there\n")
    (folder / "toolkit_lm_there.py").write_text(text)


def test_other_plugins(cluster, processes, tmp_path, monkeypatch):
    """The runtime environment of the nodes holds another plugin than the engine's."""
    write_plugin(tmp_path / "here", "HERE = 1\n")
    write_plugin(tmp_path / "there", "THERE = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "here")
    environment = f'{{"env_vars": {{"PYTHONPATH": "{tmp_path / "there"}"}}}}'
    monkeypatch.setenv("TOOLKIT_LM_PLUGINS", f"{os.environ['TOOLKIT_LM_PLUGINS']},there")
    with pytest.raises(PluginError, match=r"other plugins than its engine[\s\S]*there"):
        LLM(
            **OPTIONS,
            **SIZES["tensor"],
            plugin_option={"executor_ray": {"runtime_env": environment}},
        )
    nothing_is_left(processes)


def test_a_machine_without_the_toolkit(cluster, processes, tmp_path):
    """Ray says why; the engine does not wait until the end of the start."""
    (tmp_path / "toolkit_lm_executor_ray").mkdir()
    (tmp_path / "toolkit_lm_executor_ray" / "__init__.py").write_text(
        "raise ImportError('there is no toolkit here')"
    )
    environment = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    start = time.monotonic()
    with pytest.raises(
        EngineDeadError,
        match=r"Ray could not start node 1, of rank 0, 1: [\s\S]*there is no toolkit here",
    ):
        LLM(
            **OPTIONS,
            **SIZES["tensor"],
            plugin_option={"executor_ray": {"runtime_env": environment}},
        )
    assert time.monotonic() - start < 60
    nothing_is_left(processes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 2}, "Ray Serve has replicas"),
        ({"node_rank": 1}, "leave node_rank and launch_key_file out"),
        ({"launch_key_file": "launch.key"}, "leave node_rank and launch_key_file out"),
        ({"plugin_option": {"executor_ray": {"runtime_env": "pip"}}}, "is not a JSON object"),
        ({"plugin_option": {"executor_ray": {"cpus": 0}}}, "cpus"),
    ],
)
def test_what_is_refused_before_ray_is_asked(monkeypatch, options, message):
    monkeypatch.setattr(ray, "init", None)
    with pytest.raises(ConfigError, match=re.escape(message)):
        config = VllmConfig.make(**OPTIONS, **options)
        plugins = Plugins.load(config.plugins)
        make_executor(resolve(config, plugins), plugins)


def test_no_cluster(monkeypatch):
    def refuse(*arguments, **options):
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(
            EngineDeadError, match=r"address=auto is not reached: Could not find.*address=local"
        ),
        joined("auto"),
    ):
        pass


def test_engines_share_the_connection(monkeypatch):
    """The last one to leave ends it, unless it is the host's."""
    calls = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *arguments, **options: calls.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    with joined("auto"):
        with joined("auto"):
            pass
        assert calls == ["init"]
    assert calls == ["init", "shutdown"]
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with joined("auto"):
        pass
    assert calls == ["init", "shutdown"]
