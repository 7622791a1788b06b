"""`KVTierStore.fill`: blocks that a step fills in place, beside those that are loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVTierStore, transfers as module
from toolkit_lm.kv.cache import KVCache
from toolkit_lm.kv.group_blocks import HOST
from toolkit_lm.kv.host import HostStore
from toolkit_lm.kv.transfers import Transfers
from toolkit_lm.messages import BlockCopy, StepPlan, TierBlock, TierLoad, TierWork
from toolkit_lm_devkit import KVTierConformance

KEYS = [bytes([number]) * 32 for number in range(5)]
LAYOUT = KVTierConformance().kv_cache()


def content(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


class Store(KVTierStore):
    """Fills `at_hand` blocks at most at a time, and writes nonsense into the next one."""

    checked = False
    at_hand = 0
    raises = False

    def __init__(self, cache: KVCache) -> None:
        self.size = cache.block(0, 0).num_bytes
        self.loaded: list[bytes] = []
        self.filled: list[bytes] = []

    def store(self, group, key, block):
        raise NotImplementedError

    def load(self, group, key):
        self.loaded.append(key)
        future: Future[bytes] = Future()
        future.set_result(content(key[0], self.size))
        return future

    def fill(self, blocks: Sequence) -> int:
        count = min(len(blocks), self.at_hand)
        for index, (_, key, block) in enumerate(blocks[: count + 1]):
            data = content(key[0] if index < count else 99, self.size)
            for page in block.memory:
                page[:], data = memoryview(data)[: len(page)], data[len(page) :]
            assert not data, "the pages are the whole block"
        self.filled += [key for _, key, _ in blocks[:count]]
        if self.raises:
            raise OSError("the disk is gone")
        return count


@pytest.fixture
def cache():
    return KVCache(LAYOUT, torch.device("cpu"))


@pytest.fixture
def store(cache):
    return Store(cache)


@pytest.fixture
def transfers(cache, store):
    host = HostStore(VllmConfig.default(), LAYOUT, options=None)
    return Transfers(cache, {"mine": store, HOST: host})


def read(cache: KVCache, block: int) -> bytes:
    data = bytearray(cache.block(0, block).num_bytes)
    cache.block(0, block).read_into(data)
    return bytes(data)


def begin(ticket: int = 1, first: int = 2, keys: Sequence[bytes] = KEYS, **more) -> StepPlan:
    blocks = [TierBlock("mine", 0, key, first + index) for index, key in enumerate(keys)]
    work = TierWork(loads=[TierLoad(ticket, blocks)], loading=[ticket], **more)
    return StepPlan(tiers=work)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("at_hand", range(6))
def test_what_is_not_at_hand_is_loaded(cache, store, transfers, at_hand, raises, caplog):
    store.at_hand = at_hand
    store.raises = raises
    assert transfers.run(begin()) == {1: True}
    assert [read(cache, 2 + n) for n in range(5)] == [content(n, store.size) for n in range(5)]
    assert store.loaded == (KEYS if raises else KEYS[at_hand:])
    assert ("the disk is gone" in caplog.text) == raises


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_with_rows_fills_a_bounded_number(cache, store, transfers, waits, monkeypatch):
    """One that waits for the load goes on to its end, however many bytes there are."""
    monkeypatch.setattr(module, "_MOST_BYTES", 2 * store.size)
    monkeypatch.setattr(module, "_WAIT", 60.0)
    store.at_hand = 5
    ended = transfers.run(begin(waits=waits))
    counts = [len(store.filled)]
    while not ended:
        ended = transfers.run(StepPlan(tiers=TierWork(loading=[1])))
        counts.append(len(store.filled))
    assert ended == {1: True}
    assert counts == ([5] if waits else [2, 4, 5])
    assert store.filled == KEYS
    assert not store.loaded


def test_a_load_that_is_given_up_is_filled_no_further(cache, store, transfers, monkeypatch):
    """Its blocks are another request's by then."""
    monkeypatch.setattr(module, "_MOST_BYTES", store.size)
    store.at_hand = 5
    assert transfers.run(begin()) == {}
    cache.block(0, 3).write(content(50, store.size), checked=False)
    assert transfers.run(begin(ticket=2, first=7, keys=KEYS[:1])) == {2: True}
    assert store.filled == [KEYS[0], KEYS[0]]
    assert read(cache, 3) == content(50, store.size)


def test_blocks_are_swapped_out_before_they_are_filled(cache, store, transfers):
    """A preempted request's block may be the target of a load of the same step."""
    store.at_hand = 5
    before = content(50, store.size)
    cache.block(0, 4).write(before, checked=False)
    plan = begin()
    plan.swap_out = [BlockCopy(0, 4, 1)]
    assert transfers.run(plan) == {1: True}
    assert read(cache, 4) == content(2, store.size)
    transfers.run(StepPlan(swap_in=[BlockCopy(0, 1, 0)]))
    assert read(cache, 0) == before


def test_a_load_that_waits_behind_a_filled_one(cache, store, transfers, monkeypatch):
    """Two loads in one step: what is left of the bytes is the second one's."""
    monkeypatch.setattr(module, "_MOST_BYTES", 3 * store.size)
    store.at_hand = 5
    work = TierWork(
        loads=[
            TierLoad(1, [TierBlock("mine", 0, KEYS[0], 2), TierBlock("mine", 0, KEYS[1], 3)]),
            TierLoad(2, [TierBlock("mine", 0, KEYS[2], 4), TierBlock("mine", 0, KEYS[3], 5)]),
        ],
        loading=[1, 2],
    )
    assert transfers.run(StepPlan(tiers=work)) == {1: True}
    assert transfers.run(StepPlan(tiers=TierWork(loading=[2]))) == {2: True}
    assert [read(cache, 2 + n) for n in range(4)] == [content(n, store.size) for n in range(4)]


def test_a_device_that_is_no_cpu_has_no_memory_to_fill():
    cache = KVCache(LAYOUT, torch.device("meta"))
    assert [*cache.block(0, 1).memory] == []
