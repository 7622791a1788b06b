"""Pictures that come again, over engines here and in processes of their own: their data is sent
once, and the answers are the same."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.engine import wire
from toolkit_lm.errors import EngineDeadError, RequestError
from toolkit_lm.processing.pinned_rendering import PinnedRendering

sys.path.insert(0, str(Path(__file__).parents[1] / "contrib_models" / "vision" / "tests"))
OPTIONS = {
    "plugins": ["vision", "decoder", "loaders", "sdpa", "renderer_hf"],
    "device": "cpu",
    "max_model_len": 192,
    "num_kv_blocks": 100,
    "enable_prefix_caching": False,
    # Two pictures: the others are encoded anew, from the data that the engine holds.
    "encoder_cache_memory": "8KiB",
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
ORDER = [[0], [0, 1], [2], [0], [3, 1, 0, 3], [2, 2], [4], [0, 4, 3], [1], []]
"""Pictures of the prompts."""
PICTURE = 3 * 28 * 28 * 4
"""Bytes of one, as the encoder reads it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(
        importlib.import_module("vision_checkpoints")
        .make_subject(tmp_path_factory.mktemp("vision"), "llava")
        .folder
    )


@pytest.fixture(scope="module")
def prompts():
    pictures = importlib.import_module("vision_checkpoints").drawings(5)
    return [
        {
            "prompt": "<image>" * len(numbers) + "What?",
            **({"multi_modal_data": {"image": [pictures[i] for i in numbers]}} if numbers else {}),
        }
        for numbers in ORDER
    ]


@pytest.fixture(scope="module")
def expected(folder, prompts):
    with LLM(folder, **OPTIONS, feature_cache_memory="0") as llm:
        return answers(llm, prompts)


@pytest.fixture
def carried(monkeypatch):
    """Items whose data is in the messages to engine processes."""
    found = []
    add = wire.add

    def seen(requests, evicted=()):
        found.extend(
            feature.mm_identifier
            for one in requests
            for feature in one.features
            if feature.data is not None
        )
        return add(requests, evicted)

    monkeypatch.setattr(wire, "add", seen)
    return found


def answers(llm: LLM, prompts) -> list[list[int]]:
    return [answer(llm, prompt) for prompt in prompts]


def answer(llm: LLM, prompt) -> list[int]:
    [output] = llm.generate(prompt, PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("memory", ["0", "12KiB", "24KiB", "1GiB"])
@pytest.mark.parametrize("process", [False, True])
def test_answers_are_the_same(folder, prompts, expected, process, memory):
    """With room for none of the pictures, for one, for two and for all."""
    with LLM(folder, **OPTIONS, feature_cache_memory=memory, engine_process=process) as llm:
        mirror = llm.engine.client.features
        assert answers(llm, prompts) == expected
        outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert len(mirror.held_keys(9)) == {"0": 0, "12KiB": 1, "24KiB": 2, "1GiB": 5}[memory]
        assert mirror.num_bytes <= mirror.budget
        assert not mirror._pins
        twice = [llm.engine.processor.prepare("same id", prompts[0], PARAMS) for _ in range(2)]
        with pytest.raises(RequestError, match="in use"):
            llm.engine.submit_batch(twice)
        assert answer(llm, prompts[0]) == expected[0]
        if not process:
            assert set(llm.engine.client._features._data) == set(mirror.held_keys(9))
    assert process or not llm.engine.client._features._data, "a shut down engine keeps no memory"


def test_data_is_sent_once(folder, prompts, expected, carried):
    with LLM(folder, **OPTIONS, engine_process=True) as llm:
        assert answers(llm, prompts) == answers(llm, prompts) == expected
    assert len(carried) == len(set(carried)) == 5


def test_what_was_rendered_for_an_engine_that_died_is_rendered_for_the_next(
    folder, prompts, expected
):
    with LLM(folder, **OPTIONS, engine_process=True) as llm:
        answers(llm, prompts)
        engine = llm.engine
        prepared = [
            engine.processor.prepare(str(i), prompt, PARAMS) for i, prompt in enumerate(prompts)
        ]
        assert all(feature.data is None for one in prepared for feature in one.message.features)
        os.kill(engine.client.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while True:
                engine.advance()
        engine.restart()
        engine.wait_ready()
        assert engine.renderer.feature_cache is engine.client.features
        assert not engine.client.features.held_keys(1)
        engine.submit_batch(prepared)
        drawn = {}
        while engine.has_unfinished_requests():
            drawn |= {int(one.request_id): one.outputs[0].token_ids for one in engine.step()}
        assert [drawn[i] for i in range(len(prompts))] == expected
        assert answers(llm, prompts) == expected


def test_what_is_rendered_again_holds_nobody_up(folder, prompts, expected, monkeypatch):
    """The engine dies between a prompt's rendering and its submission."""

    async def run() -> list[list[int]]:
        async with AsyncLLM(
            VllmConfig.make(model=folder, **OPTIONS, engine_process=True, restart_engine=1)
        ) as llm:

            async def one(prompt):
                return (
                    [output async for output in llm.generate(prompt, PARAMS)][-1]
                    .outputs[0]
                    .token_ids
                )

            before = [await one(prompt) for prompt in prompts[:2]]
            prepare = llm.processor.prepare_batch
            render_again = llm.processor.render_again

            def prepare_and_die(*args):
                prepared = prepare(*args)
                os.kill(llm.engine.client.process.pid, signal.SIGKILL)
                while llm.num_restarts == 0:
                    time.sleep(0.01)
                return prepared

            def watched(prepared):
                threads.append(threading.current_thread().name)
                return render_again(prepared)

            dying = partial(asyncio.to_thread, prepare_and_die)
            monkeypatch.setattr(llm._preparation, "prepare_batch", dying)
            monkeypatch.setattr(llm.processor, "render_again", watched)
            return [*before, await one(prompts[1])]

    threads: list[str] = []
    assert asyncio.run(run()) == [expected[0], expected[1], expected[1]]
    assert len(threads) == 1
    assert threads[0] != "toolkit_lm-engine"


def test_an_engine_asks_for_what_it_lacks(folder, prompts, expected, carried):
    """An engine that has lost an item behaves like one that never had it."""
    with (
        LLM(folder, **OPTIONS, engine_process=True) as llm,
        LLM(folder, **OPTIONS, engine_process=True) as other,
    ):
        answers(other, prompts)
        mirror = llm.engine.client.features
        mirror._held.update(other.engine.client.features._held)
        carried.clear()
        assert answers(llm, prompts) == expected
        assert len(carried) == 5, "each was asked for once"
        assert not llm.engine._rendered


def test_what_an_engine_asks_for_is_rendered_where_its_caller_renders(
    folder, prompts, expected, monkeypatch
):
    """The engine's thread goes on with other requests meanwhile."""

    async def run(other: LLM) -> None:
        async with AsyncLLM(VllmConfig.make(model=folder, **OPTIONS, engine_process=True)) as llm:
            render_again = llm.processor.render_again
            begun = threading.Event()
            let = threading.Event()
            threads = []

            def slow(prepared):
                threads.append(threading.current_thread().name)
                begun.set()
                assert let.wait(30)
                return render_again(prepared)

            async def one(prompt):
                return [output async for output in llm.generate(prompt, PARAMS)][-1].outputs[0]

            def lose() -> None:
                llm.engine.client.features._held.update(other.engine.client.features._held)
                begun.clear()
                let.clear()

            monkeypatch.setattr(llm.processor, "render_again", slow)
            lose()
            asked = asyncio.ensure_future(one(prompts[0]))
            assert await asyncio.to_thread(begun.wait, 30)
            assert (await asyncio.wait_for(one("plain"), 30)).token_ids
            assert not asked.done()
            let.set()
            assert (await asked).token_ids == expected[0]
            # Who has left meanwhile is not served, and its id is free.
            lose()
            asked = asyncio.ensure_future(one(prompts[1]))
            assert await asyncio.to_thread(begun.wait, 30)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            let.set()
            assert (await one(prompts[1])).token_ids == expected[1]
            # An error is that request's.
            lose()
            let.set()
            monkeypatch.setattr(llm.processor, "render_again", fail)
            ended = await one(prompts[2])
            assert (ended.finish_reason, (await one("plain")).finish_reason) == ("error", "length")
            assert threads and "toolkit_lm-engine" not in threads
            assert not llm.engine._rendered

    def fail(prepared):
        raise RequestError("the picture is gone.")

    with LLM(folder, **OPTIONS, engine_process=True) as other:
        answers(other, prompts)
        asyncio.run(run(other))


def test_what_is_lacking_twice_ends_the_request(folder, prompts, expected, monkeypatch):
    with (
        LLM(folder, **OPTIONS, engine_process=True) as llm,
        LLM(folder, **OPTIONS, engine_process=True) as other,
    ):
        answers(other, prompts)
        mirror = llm.engine.client.features
        held = other.engine.client.features._held
        forget = mirror.forget

        def forget_nothing(names):
            forget(names)
            mirror._held.update(held)

        monkeypatch.setattr(mirror, "forget", forget_nothing)
        mirror._held.update(held)
        ended, fine = llm.generate([prompts[0], prompts[-1]], PARAMS, use_tqdm=False)
        assert (ended.outputs[0].finish_reason, fine.outputs[0].token_ids) == (
            "error",
            expected[-1],
        )
        assert "twice" in ended.error


@pytest.mark.parametrize("process", [False, True])
def test_a_request_that_ends_before_its_answer_changes_nothing(folder, prompts, expected, process):
    async def run():
        async with AsyncLLM(
            VllmConfig.make(
                model=folder, **OPTIONS, feature_cache_memory="24KiB", engine_process=process
            )
        ) as llm:

            async def one(number):
                tokens = None
                async for output in llm.generate(prompts[number], PARAMS):
                    if number % 3 == 0:
                        break
                    tokens = output.outputs[0].token_ids
                return tokens

            for _ in range(3):
                found = await asyncio.gather(*(one(number) for number in range(len(prompts))))
                assert found == [
                    None if number % 3 == 0 else tokens for number, tokens in enumerate(expected)
                ]
            return llm.engine.client.features

    mirror = asyncio.run(run())
    mirror._unpin()
    assert not mirror._pins


def test_texts_are_not_concerned(folder, prompts, monkeypatch):
    """A model without media has no lookup; with it, a text has nothing that could be rendered
    again."""
    with LLM(
        "tiny",
        plugins=["tiny", "decoder", "loaders", "sdpa", "renderer_hf"],
        attention_backend="sdpa",
        kernels="torch",
    ) as llm:
        assert llm.engine.renderer.feature_cache is None
        monkeypatch.setattr(PinnedRendering, "__init__", None)
        answer(llm, "Once")
    monkeypatch.undo()
    with LLM(folder, **OPTIONS) as llm:
        assert llm.engine.processor.prepare("a", "A text", PARAMS).rendering is None
        assert llm.engine.processor.prepare("b", prompts[0], PARAMS).rendering is not None


def test_a_front_keeps_no_data(folder, prompts):
    with LLM(folder, **OPTIONS, engine_process=True) as llm:
        prepared = llm.engine.processor.prepare("0", prompts[4], PARAMS)
        assert (
            sum(
                array.data.nbytes
                for one in prepared.message.features
                for array in one.data.values()
            )
            == 4 * PICTURE
        )
        llm.engine.submit(prepared)
        assert all(one.data is None for one in prepared.message.features)
