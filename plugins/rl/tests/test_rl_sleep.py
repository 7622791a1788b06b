"""Pauses and sleeps."""

from __future__ import annotations

import asyncio

import pytest
import torch
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm_rl import kept
from toolkit_lm_rl.control import AsyncControl, Control
from toolkit_lm_rl.memory import pairs, release_pages, storages, whole_pages
from toolkit_lm_weights.beside import networks_beside

PROMPTS = ["Once upon a time", "The capital of France is"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1, ignore_eos=True)


def tokens(llm):
    return [
        (output.outputs[0].token_ids, output.outputs[0].cumulative_logprob)
        for output in llm.generate(PROMPTS, GREEDY)
    ]


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes(level, kernels):
    with LLM("tiny", kernels=kernels) as llm:
        expected = tokens(llm)
        control = Control(llm)
        control.sleep(level)
        cache = llm.engine.client.core.executor.runner.kv_cache
        assert [pool.num_blocks for pool in cache.pools] == [1] * len(cache.pools)
        assert control.is_sleeping()
        with pytest.raises(RequestError, match=r"paused or asleep: resume\(\) or wake_up\(\)"):
            tokens(llm)
        if level == 2:
            model = llm.engine.client.core.executor.runner.model
            large = [memory for memory in storages(model).values() if memory.nbytes() > 2**16]
            assert large
            for memory in large:
                content = torch.empty(0, dtype=torch.uint8).set_(memory)
                assert not content[4096:-4096].any()
        assert not control.wake_up(["weights"])
        assert control.state().asleep == ["kv_cache", "scheduling"]
        assert control.wake_up(["kv_cache"])
        assert tokens(llm) == expected
        # An engine can sleep again.
        control.sleep(level)
        assert control.wake_up()
        assert tokens(llm) == expected


KEPT = [
    {"kernels": "cpu"},
    {"kernels": "cpu", "dtype": "bfloat16"},
    {"kernels": "torch"},
    {"quantization": "int8"},
    {"quantization": "int4"},
]


@pytest.mark.parametrize("options", KEPT, ids=lambda options: " ".join(options.values()))
def test_weights_that_are_kept_come_back_without_the_checkpoint(options, tmp_path, monkeypatch):
    """With memory that is packed, converted, or mapped from a file of its own."""
    cache = {"quantize": {"cache_dir": str(tmp_path)}} if "quantization" in options else {}
    # The second engine finds the quantized weights in the cache, and maps them.
    for _ in range(1 + bool(cache)):
        with LLM("tiny", **options, plugin_option=cache) as llm:
            expected = tokens(llm)
            control = Control(llm)
            part = llm.engine.client.core.executor.runner.parts.by_name["rl"]
            made = []
            monkeypatch.setattr(part, "_made", lambda *args, made=made: made.append(args))
            for _ in range(3):
                assert control.sleep(2, keep=True)
                assert control.state().keeps_weights
                assert control.wake_up()
                assert not control.state().keeps_weights
                assert tokens(llm) == expected
            assert not made
            # A deeper sleep after a level 1.
            assert not control.sleep(1, keep=True)
            assert control.sleep(2, keep=True)
            assert control.wake_up()
            assert tokens(llm) == expected
            monkeypatch.undo()


def test_weights_that_change_asleep_are_not_those_of_the_file(policies):
    """New weights may come to a sleeping engine, and between two sleeps."""
    options = {"renderer": "tokens", "max_model_len": 64, "num_kv_blocks": 48}
    prompts = [{"prompt_token_ids": [5, 6, 7, 8]}]

    def found(llm):
        return llm.generate(prompts, GREEDY)[0].outputs[0].token_ids

    with LLM(str(policies / "new"), **options) as llm:
        new = found(llm)
    with LLM(str(policies / "old"), **options) as llm:
        old = found(llm)
        control = Control(llm)
        assert old != new
        assert control.sleep(2, keep=True)
        control.update_weights(str(policies / "new"))
        assert control.wake_up()
        assert found(llm) == new
        assert control.sleep(2, keep=True)
        assert control.wake_up()
        assert found(llm) == new
        control.update_weights(str(policies / "old"))
        for keep in (True, False, True):
            assert control.sleep(2, keep=keep) is keep
            assert control.wake_up()
            assert found(llm) == old


def test_weights_for_which_no_disk_has_room_come_from_the_checkpoint(monkeypatch, caplog):
    with LLM("tiny") as llm:
        expected = tokens(llm)
        control = Control(llm)
        monkeypatch.setattr(kept, "_file_system", lambda folder: "tmpfs")
        assert not control.sleep(2, keep=True)
        assert "is in memory (tmpfs)" in caplog.text
        assert control.wake_up()
        assert tokens(llm) == expected
        monkeypatch.undo()
        monkeypatch.setattr(kept, "_ROOM", 0.0)
        assert not control.sleep(2, keep=True)
        assert "free bytes" in caplog.text
        assert control.wake_up()
        assert tokens(llm) == expected
        monkeypatch.undo()
        # A disk that fails later.
        assert control.sleep(2, keep=True)
        part = llm.engine.client.core.executor.runner.parts.by_name["rl"]
        part._kept._file.truncate(0)
        assert control.wake_up()
        assert "the file is too short" in caplog.text
        assert tokens(llm) == expected


def contents(network) -> dict:
    return {
        pair.place: pair.old.clone()
        for pair in pairs(network, network)
        # Results on the way through a step are no weights.
        if isinstance(pair.old, torch.Tensor) and "_workspace" not in pair.place
    }


def weigh(network) -> int:
    """Bytes of the network's pages that are not zero."""
    return sum(
        int(torch.empty(0, dtype=torch.uint8).set_(memory)[4096:-4096].any()) * memory.nbytes()
        for memory in storages(network).values()
    )


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("drafter", ["draft_model", "eagle"])
def test_a_draft_model_sleeps_with_its_target(drafter, keep):
    """Its weights are dropped, and come back from the file or from its own checkpoint."""
    model = {"draft_model": "tiny-draft", "eagle": "tiny-eagle"}[drafter]
    options = {"drafter": drafter, "draft_budget": "all"}
    with LLM("tiny", **options, plugin_option=[f"drafters.model={model}"]) as llm:
        expected = tokens(llm)
        control = Control(llm)
        [part] = networks_beside(llm.engine.client.core.executor.runner.model)
        before = contents(part.network)
        assert weigh(part.network)
        for _ in range(2):
            assert control.sleep(2, keep=keep) is keep
            assert not weigh(part.network)
            assert control.wake_up()
            after = contents(part.network)
            assert after.keys() == before.keys()
            assert all(torch.equal(after[place], before[place]) for place in before)
            assert tokens(llm) == expected


def test_a_draft_model_stays_when_its_target_changes(policies):
    """Weights that come to a sleeping engine are the target's. Those of the draft model, whose
    file is forgotten then, are read anew."""
    options = {"renderer": "tokens", "max_model_len": 64, "num_kv_blocks": 48}
    draft = {"drafter": "draft_model", "plugin_option": [f"drafters.model={policies / 'old'}"]}
    with LLM(str(policies / "old"), **options, **draft) as llm:
        control = Control(llm)
        [part] = networks_beside(llm.engine.client.core.executor.runner.model)
        before = contents(part.network)
        assert control.sleep(2, keep=True)
        control.update_weights(str(policies / "new"))
        assert control.wake_up()
        after = contents(part.network)
        assert all(torch.equal(after[place], before[place]) for place in before)


def test_a_file_has_the_contents_of_the_last_sleep():
    """Memory that has changed since the first one is written again, and no other."""
    tensor = torch.arange(5 * 2**20, dtype=torch.int32)
    memory = kept.Kept()
    ranges = [whole_pages(tensor.untyped_storage())]
    for place in (0, 2**20, tensor.numel() - 1):
        tensor[place] = -7
        wanted = tensor.clone()
        assert memory.keep(ranges)
        release_pages(tensor.untyped_storage())
        assert not torch.equal(tensor, wanted)
        assert memory.restore()
        assert torch.equal(tensor, wanted)
    memory.forget()
    assert not memory.restore()


def test_values_that_are_wrong():
    with LLM("tiny") as llm:
        control = Control(llm)
        with pytest.raises(RequestError, match="level must be 0, 1 or 2, not 3"):
            control.sleep(3)
        with pytest.raises(RequestError, match="tags: 'kv' is none of weights, kv_cache, sched"):
            control.wake_up(["kv"])
        assert control.wake_up()
        control.pause()
        assert control.state().is_paused
        with pytest.raises(RequestError, match="paused or asleep"):
            tokens(llm)
        control.resume()
        control.sleep(0)
        assert control.state().asleep == ["scheduling"]
        assert control.wake_up(["scheduling"])
        assert tokens(llm)


async def running(llm, name, num_tokens=60):
    """Begins a request, and returns its task once it has some tokens."""
    begun = asyncio.Event()

    async def ask():
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        async for output in llm.generate(PROMPTS[0], params, name):
            if len(output.outputs[0].token_ids) > 2:
                begun.set()
        return output.outputs[0]

    task = asyncio.create_task(ask())
    await begun.wait()
    return task


@pytest.mark.anyio
@pytest.mark.parametrize("engine_process", [False, True])
async def test_requests_are_kept(engine_process):
    config = VllmConfig.make(model="tiny", engine_process=engine_process)
    async with AsyncLLM(config) as llm:
        control = AsyncControl(llm)
        expected = await (await running(llm, "alone"))
        for begin, end in (
            (lambda: control.pause("keep"), control.resume),
            (lambda: control.sleep(1, "keep"), control.wake_up),
            (lambda: control.sleep(2, "keep"), control.wake_up),
        ):
            task = await running(llm, "kept")
            await begin()
            state = await control.state()
            assert state.is_paused
            assert not task.done()
            later = asyncio.create_task(anext(llm.generate(PROMPTS[1], GREEDY, "later")))
            for _ in range(3):
                assert (await control.state()).is_paused
            assert not task.done()
            assert not later.done()
            await end()
            assert (await task).token_ids == expected.token_ids
            assert await later


@pytest.mark.anyio
async def test_requests_end_or_finish():
    async with AsyncLLM(VllmConfig.make(model="tiny", engine_process=False)) as llm:
        control = AsyncControl(llm)
        task = await running(llm, "aborted")
        await control.pause("abort")
        assert (await task).finish_reason == "abort"
        await control.resume()
        task = await running(llm, "waited for")
        await control.pause("wait")
        assert len((await task).token_ids) == 60
        assert (await control.state()).is_paused
        await control.resume()
        task = await running(llm, "asleep")
        await control.sleep(1)
        assert (await task).finish_reason == "abort"
        await control.wake_up()
        task = await running(llm, "awaited")
        await control.sleep(1, "wait")
        assert len((await task).token_ids) == 60
        await control.wake_up()
        assert len((await (await running(llm, "after"))).token_ids) == 60
