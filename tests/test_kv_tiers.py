"""KV tiers through the whole engine: what the device gives up is kept elsewhere, and found again.
The tokens are the same."""

from __future__ import annotations

import importlib
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.kv import HostStore
from toolkit_lm_devkit import KVTierConformance

FOLDER = Path(__file__).parent / "plugins"
for plugin in ("memory_tier", "threads"):
    sys.path.insert(0, str(FOLDER / plugin))
THREADS = importlib.import_module("toolkit_lm_threads")
MEMORY = importlib.import_module("toolkit_lm_memory_tier")
STORE = importlib.import_module("toolkit_lm_memory_tier.store").MemoryStore
TIER = importlib.import_module("toolkit_lm_memory_tier.tier").MemoryTier

SMALL = {
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"prompt_token_ids": torch.randint(3, 272, (n,), generator=generator).tolist()}
        for n in lengths
    ]


PROMPTS = prompts(70, 66, 60, 71)
"""Two of them fill the device."""


@pytest.fixture(params=["full", "windowed"])
def options(request, make_llama, make_windowed):
    folder, _ = make_llama("engine") if request.param == "full" else make_windowed()
    blocks = 30 if request.param == "full" else 60
    return SMALL | {"model": str(folder), "num_kv_blocks": blocks}


@pytest.fixture
def small(make_llama):
    return SMALL | {"model": str(make_llama("engine")[0]), "num_kv_blocks": 30}


def with_tier(options, plugins=(), **more) -> LLM:
    return LLM(plugins=[MEMORY, *plugins], **options | more)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def one_by_one(llm, given=PROMPTS):
    return [llm.generate([one], GREEDY, use_tqdm=False)[0] for one in given]


def tier_of(llm):
    return llm.engine.client.core.scheduler.tiers.tiers["memory"]


def store_of(llm, rank=None):
    executor = llm.engine.client.core.executor
    runner = executor.runner if rank is None else executor.runners[rank]
    return runner._transfers._stores["memory"]


@pytest.mark.parametrize("overlap", [False, True])
def test_what_the_device_gave_up_is_found_again(options, watch, overlap):
    with LLM(**options) as llm:
        expected = tokens(one_by_one(llm))
    with with_tier(options, [watch], overlap=overlap) as llm:
        first = one_by_one(llm)
        again = one_by_one(llm)
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert tier_of(llm).num_loaded > 0
    assert tokens(first) == tokens(again) == tokens(together) == expected
    assert [output.num_cached_tokens for output in first] == [0] * 4
    # All but the block that holds the last token, which is computed in any case.
    cached = [(len(one["prompt_token_ids"]) - 1) // 4 * 4 for one in PROMPTS]
    assert [output.num_cached_tokens for output in again] == cached
    assert watch.last("num_used_blocks") == 0
    assert (watch.last("num_running"), watch.last("num_waiting")) == (0, 0)


def test_a_tier_that_holds_little_brings_what_it_has(small):
    with LLM(**small) as llm:
        expected = tokens(one_by_one(llm))
    limited = {"toolkit_lm_memory_tier": {"capacity": 3}}
    with with_tier(small, plugin_option=limited) as llm:
        for _ in range(2):
            assert tokens(one_by_one(llm)) == expected
            assert len(tier_of(llm).held) <= 3
            assert len(store_of(llm).blocks) <= 3


def spoil(llm, change, rank=None) -> None:
    """A store that gives back changed blocks, by `change`."""
    store = store_of(llm, rank)
    load = store.load

    def spoiled(group, key):
        future: Future[bytes] = Future()
        change(future, load(group, key).result())
        return future

    store.load = spoiled


def test_a_load_that_fails_is_told(small, caplog):
    with with_tier(small) as llm:
        first = one_by_one(llm)
        spoil(llm, lambda future, data: future.set_exception(OSError("gone")))
        assert tokens(one_by_one(llm)) == tokens(first)
    assert "KV tier 'memory': a load has failed" in caplog.text


@pytest.mark.parametrize("how", ["abort", "deadline", "a step fails"])
def test_a_request_can_end_while_it_is_loaded(small, watch, how):
    """It waits for a load that never ends. Meanwhile others run, and the engine does not spin."""
    with with_tier(small, [watch]) as llm:
        engine = llm.engine
        core = engine.client.core
        first = one_by_one(llm)
        spoil(llm, lambda future, data: None)
        timeout = 1.0 if how == "deadline" else None
        engine.add_request("stuck", PROMPTS[0], GREEDY, timeout=timeout)
        while not core.scheduler.roster.loading:
            engine.step()
        began = time.monotonic()
        for _ in range(10):
            engine.step()
        assert time.monotonic() - began > 0.02, "it spins"
        assert watch.last("num_waiting") == 1
        engine.add_request("other", {"prompt_token_ids": [7] * 9}, GREEDY)
        ended = []
        while not ended:
            ended = [one.request_id for one in engine.step() if one.finished]
        assert ended == ["other"]
        assert core.scheduler.roster.loading
        if how == "abort":
            engine.abort(["stuck"])
        elif how == "deadline":
            while core.scheduler.roster.loading:
                engine.step()
        else:
            core._reset_after_failure()
            store_of(llm).load = type(store_of(llm)).load.__get__(store_of(llm))
            while engine.has_unfinished_requests():
                engine.step()
        engine.advance(timeout=0)
        assert not core.scheduler.roster.requests
        assert core.scheduler.blocks.num_used == 0
        store_of(llm).load = type(store_of(llm)).load.__get__(store_of(llm))
        assert tokens(one_by_one(llm)) == tokens(first)


RANKS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "both": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_keeps_its_own_bytes(options, ranks):
    """With windows, a stage has no layer of one of the groups."""
    with LLM(plugins=[THREADS], executor="threads", **options | RANKS[ranks]) as llm:
        expected = tokens(one_by_one(llm))
    with with_tier(options, [THREADS], executor="threads", **RANKS[ranks]) as llm:
        assert tokens(one_by_one(llm)) == expected
        again = one_by_one(llm)
        together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        runners = llm.engine.client.core.executor.runners
        held = [store_of(llm, rank).blocks for rank in range(len(runners))]
        assert tier_of(llm).num_loaded > 0
        assert llm.engine.client.core.scheduler.blocks.num_used == 0
    assert tokens(again) == tokens(together) == expected
    cached = [(len(one["prompt_token_ids"]) - 1) // 4 * 4 for one in PROMPTS]
    assert [output.num_cached_tokens for output in again] == cached
    assert len({frozenset(one) for one in held}) == 1, "ranks hold other blocks"
    assert len({frozenset(one.items()) for one in held}) == len(held), "ranks hold other bytes"


SWAP = {"preemption_mode": "swap", "swap_memory": "1MiB", "enable_prefix_caching": False}
BESIDE = prompts(30, 33, 36, 39)
"""Together they begin, and have to give way."""


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_swaps_its_own_bytes(options, ranks, watch):
    """To the tier `host`."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(**options | {"enable_prefix_caching": False}) as llm:
        expected = tokens([llm.generate([one], long, use_tqdm=False)[0] for one in BESIDE])
    given = options | SWAP | RANKS[ranks]
    with LLM(plugins=[THREADS, watch], executor="threads", **given) as llm:
        found = llm.generate(BESIDE, long, use_tqdm=False)
    assert tokens(found) == expected
    assert watch.count("preempted")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("how", ["fails", "is late", "cannot store"])
def test_what_one_rank_lacks_all_ranks_compute(small, ranks, how, watch, monkeypatch):
    """On the first rank and on the last, while requests run beside."""
    monkeypatch.setattr(TIER, "timeout", 0.2 if how == "is late" else 60)
    with with_tier(small, [THREADS, watch], executor="threads", **RANKS[ranks]) as llm:
        num_ranks = len(llm.engine.client.core.executor.runners)
        if how == "cannot store":
            for rank in (0, num_ranks - 1):
                store_of(llm, rank).store = lambda *block: 1 / 0
        first = tokens(one_by_one(llm))
        for rank in (0, num_ranks - 1):
            if how != "cannot store":
                fails = how == "fails"
                spoil(llm, (lambda *one: 1 / 0) if fails else (lambda *one: None), rank)
            assert tokens(one_by_one(llm)) == first
            together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert tokens(together) == first
            if how != "cannot store":
                del store_of(llm, rank).load
        assert tier_of(llm).num_loaded > 0
        # Blocks that every rank has are loaded again.
        loaded = tier_of(llm).num_loaded
        assert tokens(one_by_one(llm)) == tokens(one_by_one(llm)) == first
        assert tier_of(llm).num_loaded > loaded
    assert watch.last("num_used_blocks") == 0


def test_a_step_that_fails_on_one_rank_ends_its_loads_on_all(small, monkeypatch):
    """One rank never hears of the load that the failed step began."""
    with with_tier(small, [THREADS], executor="threads", tensor_parallel_size=2) as llm:
        first = tokens(one_by_one(llm))
        runner = llm.engine.client.core.executor.runners[1]
        run = runner._transfers.run
        failed = []

        def once(plan):
            if plan.tiers is not None and plan.tiers.loads and not failed:
                failed.append(plan)
                raise OSError("one rank alone")
            return run(plan)

        runner._transfers.run = once
        assert tokens(one_by_one(llm)) == first
        assert failed
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == first


@pytest.mark.parametrize("ranks", ["tensor", "pipeline"])
def test_ranks_that_are_processes(small, install, ranks, watch):
    """Both tiers: blocks of cached prefixes, and blocks of preempted requests."""
    long = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(**small) as llm:
        expected = tokens(one_by_one(llm))
        beside = tokens([llm.generate([one], long, use_tqdm=False)[0] for one in BESIDE])
    install("memory_tier")
    swap = SWAP | {"enable_prefix_caching": True}
    with LLM(plugins=[watch], executor="mp", **small | swap | RANKS[ranks]) as llm:
        assert tokens(one_by_one(llm)) == tokens(one_by_one(llm)) == expected
        assert tier_of(llm).num_loaded > 0
        assert tokens(llm.generate(BESIDE, long, use_tqdm=False)) == beside
    assert watch.count("preempted")


class TestMemory(KVTierConformance):
    store = STORE
    tier = TIER
    options = MEMORY.Options(capacity=64)
    name = "memory"
    plugins = (MEMORY,)


class TestHost(KVTierConformance):
    store = HostStore
    keys = (0, 1, 2)
