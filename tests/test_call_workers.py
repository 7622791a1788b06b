"""Calls of workers: an app reaches a part on every rank, however the ranks run."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path

import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineClient
from toolkit_lm.errors import EngineDeadError, RequestError, ToolkitError
from toolkit_lm.executor import Executor
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepPart, worker_method

FOLDER = Path(__file__).parent / "plugins"
PLUGINS = ["tiny", "decoder", "loaders", "sdpa", "cpu", "renderer_hf", "executor_mp"]
TOPOLOGIES = {
    "in_process": {},
    "overlap": {"overlap": True},
    "process": {"engine_process": True},
    "threads": {"executor": "threads", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "mp": {"executor": "mp", "tensor_parallel_size": 2, "engine_process": True},
    "mp stages": {"executor": "mp", "pipeline_parallel_size": 2},
    "data_parallel": {"data_parallel_size": 2},
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The plugins, as installed ones: in other processes too."""
    site = tmp_path_factory.mktemp("site")
    for name, package in (
        ("counter", "toolkit_lm_counter"),
        ("threads", "toolkit_lm_threads"),
    ):
        info = site / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            "Requires-Dist: toolkit-lm-core>=0.2,<0.3\n"
        )
        (info / "entry_points.txt").write_text(f"[toolkit_lm]\n{name} = {package}\n")
    paths = [str(site), str(FOLDER / "counter"), str(FOLDER / "threads")]
    with pytest.MonkeyPatch.context() as patch:
        for one in paths:
            patch.syspath_prepend(one)
        patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]))
        importlib.invalidate_caches()
        yield
    sys.modules.pop("toolkit_lm_counter", None)


def made(topology: str, **options) -> LLM:
    chosen = TOPOLOGIES[topology]
    names = [*PLUGINS, "counter"]
    names += [one for one in ("threads", "data_parallel") if one in (topology,)]
    return LLM("tiny", plugins=names, max_model_len=64, num_kv_blocks=32, **chosen | options)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_rank_answers(topology):
    counter = importlib.import_module("toolkit_lm_counter.worker")
    sizes = TOPOLOGIES[topology]
    stages = sizes.get("pipeline_parallel_size", 1)
    ranks = sizes.get("tensor_parallel_size", 1) * stages
    engines = sizes.get("data_parallel_size", 1)
    with made(topology) as llm:
        assert llm.call_workers("counter.reset", 5) == [None] * ranks * engines
        found = llm.call_workers("counter.count", answer=counter.Counted)
        assert [one.rank for one in found] == list(range(ranks)) * engines
        assert {one.num_tokens for one in found} == {5}
        # The last stage alone has it.
        stage = llm.call_workers("last.stage", answer=int)
        assert stage == [stages - 1] * (ranks // stages) * engines

        [before] = llm.generate(["Once upon a time"], GREEDY, use_tqdm=False)
        assert sum(
            one.num_tokens for one in llm.call_workers("counter.count", None, counter.Counted)
        ) > (5 * ranks * engines)
        with pytest.raises(RequestError, match=r"no worker has the method 'counter.cuont'.*count"):
            llm.call_workers("counter.cuont")
        culprit = rf"plugin 'counter'.*as it was told \(counter\.fail on rank {ranks - 1}\)"
        with pytest.raises(ToolkitError, match=culprit):
            llm.call_workers("counter.fail", ranks - 1)
        [after] = llm.generate(["Once upon a time"], GREEDY, use_tqdm=False)
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        if ranks > stages:
            # A rank that raises would leave the others waiting.
            with pytest.raises(ToolkitError, match=r"counter.gather on rank 0"):
                llm.call_workers("counter.gather")
    with pytest.raises(EngineDeadError):
        llm.call_workers("counter.count")


@pytest.fixture(scope="module")
def llm():
    with made("in_process") as found:
        yield found


@pytest.mark.parametrize(
    ("method", "payload", "match"),
    [
        ("counter.secret", None, "no worker has the method"),
        ("counter.__init__", None, "no worker has the method"),
        ("model.forward", None, "no worker has the method"),
        ("nowhere", None, r"There are: counter\.boast, counter\.confuse, .*last\.stage\."),
        ("counter.reset", "five", "its payload does not fit: Expected `int`, got `str`"),
        ("counter.count", 5, "its payload does not fit: Expected `null`"),
        ("counter.reset", object(), r"the payload of counter\.reset cannot be sent"),
        ("counter.reset", b"0" * (16 * 2**20), "the payload .* bytes: the most is 16777216"),
        ("counter.boast", 16 * 2**20, "the answer .* bytes: the most is 16777216"),
        ("counter.confuse", None, "the answer of counter.confuse cannot be sent"),
    ],
)
def test_what_cannot_be_called_is_refused(llm, method, payload, match):
    with pytest.raises(RequestError, match=match):
        llm.call_workers(method, payload)


def test_an_answer_of_another_type_is_refused(llm):
    with pytest.raises(
        RequestError, match=r"counter\.boast: its answer does not fit: Expected `int`"
    ):
        llm.call_workers("counter.boast", 3, answer=int)
    assert llm.call_workers("counter.boast", 3, answer=str) == ["xxx"]


def test_requests_of_the_loop_are_not_lost(llm):
    llm.engine.add_request("one", "Once", GREEDY)
    with pytest.raises(ToolkitError, match="still running"):
        llm.call_workers("counter.count")
    called = llm.engine.call_workers("counter.boast", 2, str)
    tokens = []
    while llm.engine.has_unfinished_requests():
        tokens += [one.outputs[0].token_ids for one in llm.engine.step()]
    assert called.result() == ["xx"] and len(tokens[-1]) == 6


def test_a_worker_method_states_its_types():
    with pytest.raises(TypeError, match=r"Bad\.load is to take self and at most one annotated"):

        class Bad(StepPart):
            @worker_method
            def load(self, path) -> None: ...


@pytest.mark.anyio
@pytest.mark.parametrize("process", [False, True])
async def test_requests_go_on_beside_calls(process):
    counter = importlib.import_module("toolkit_lm_counter.worker")
    config = VllmConfig.make(
        model="tiny", plugins=[*PLUGINS, "counter"], engine_process=process, max_model_len=512
    )
    async with AsyncLLM(config) as llm:
        params = GREEDY.replace(max_tokens=400)

        async def generate():
            async for output in llm.generate("Once upon a time", params):
                last = output
            return last.outputs[0].token_ids

        alone = await generate()
        # While it is idle, a call wakes it.
        [idle] = await llm.call_workers("counter.count", answer=counter.Counted)
        running = asyncio.create_task(generate())
        counts = [idle]
        while not running.done():
            counts += await llm.call_workers("counter.count", answer=counter.Counted)
            with pytest.raises(ToolkitError, match="as it was told"):
                await llm.call_workers("counter.fail", 0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(llm.call_workers("counter.count"), 0)
        assert running.result() == alone
        assert all(one.between_steps for one in counts)
        assert len({one.num_tokens for one in counts}) > 2, "some between its steps"
    with pytest.raises(EngineDeadError):
        await llm.call_workers("counter.count")


def test_every_executor_and_client_carries_calls():
    plugins = Plugins.load()
    executors = {
        entry.key: plugins.executors.load(entry.key) for entry in plugins.executors.entries()
    }
    assert {"in_process", "mp", "ray"} <= executors.keys()
    for name, kind in executors.items():
        assert kind.call is not Executor.call, name
    importlib.import_module("toolkit_lm_data_parallel.client")
    clients = EngineClient.__subclasses__()
    assert len(clients) >= 3
    for client in clients:
        assert client.call_workers is not EngineClient.call_workers, client


def test_others_say_that_they_carry_none():
    with pytest.raises(ToolkitError, match="the executor Mine carries no calls"):
        Executor.call(object.__new__(type("Mine", (), {})), "a.b", b"")
