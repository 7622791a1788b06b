"""KVTierConformance: what every KV tier must do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import (
    FullSpec,
    KVCache,
    KVCacheConfig,
    KVTier,
    KVTierStore,
    Transfers,
    plan_groups,
)
from toolkit_lm.messages import StepPlan, TierBlock, TierKey, TierLoad, TierWork

from toolkit_lm_devkit.kv_tier_engine import KVTierInEngine

_WAIT = 10.0
"""Seconds that a load may take here."""


def _digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


class KVTierConformance(KVTierInEngine):
    """Subclass it as `class TestMine(KVTierConformance)`, and name both halves and the tier, or the
    worker's half alone for a tier that keeps blocks by their places."""

    store: ClassVar[type[KVTierStore]]
    """The half on the worker."""
    tier: ClassVar[type[KVTier] | None] = None
    """The half in the scheduler."""
    options: ClassVar[Any] = None
    """The plugin's own, for room of eight blocks at least."""
    keys: ClassVar[Sequence[TierKey]] = tuple(map(_digest, range(3)))
    """Three that the store takes."""

    def kv_cache(self) -> KVCacheConfig:
        """Two KV groups, of two layers and of one, in blocks of different sizes."""
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 3, "dtype": "float32"}
        specs = {
            "a": FullSpec(block_size=4, **shape),
            "b": FullSpec(block_size=4, **shape),
            "c": FullSpec(block_size=8, **shape),
        }
        planned = plan_groups(specs, dict.fromkeys(specs, "none"))
        return planned.sized([8] * len(planned.pools), [8] * len(planned.pools))

    @pytest.fixture
    def worker(self) -> Iterator[Worker]:
        made = Worker(self.kv_cache(), self.store, self.options)
        yield made
        made.transfers.close()

    # The worker's half

    def test_what_is_stored_comes_back(self, worker: Worker) -> None:
        """Blocks of each group are stored under several keys and loaded into other blocks,
        twice."""
        for group in (0, 1):
            held = {key: worker.fill(group, block) for block, key in enumerate(self.keys)}
            worker.store(group, list(held))
            for _ in range(2):
                worker.fill(group, 0)
                assert worker.load(group, list(held), first=4)
                for block, content in enumerate(held.values()):
                    assert worker.read(group, 4 + block) == content, f"group {group}"

    def test_a_block_is_copied_when_it_is_stored(self, worker: Worker) -> None:
        """The step writes over it."""
        before = worker.fill(0, 0)
        worker.store(0, [self.keys[0]])
        worker.fill(0, 0)
        assert worker.load(0, [self.keys[0]], first=5)
        assert worker.read(0, 5) == before

    def test_what_is_stored_again_is_the_last(self, worker: Worker) -> None:
        worker.fill(1, 0)
        worker.store(1, [self.keys[0]])
        worker.drop(1, self.keys[0])
        last = worker.fill(1, 0)
        worker.store(1, [self.keys[0]])
        assert worker.load(1, [self.keys[0]], first=3)
        assert worker.read(1, 3) == last

    def test_what_is_not_there_is_a_miss(self, worker: Worker) -> None:
        """Nothing is written then, and nothing is raised."""
        if self.tier is None:
            pytest.skip("its places are given by who asks")
        before = worker.fill(0, 6)
        worker.drop(0, _digest(999))
        assert not worker.load(0, [_digest(999)], first=6)
        assert worker.read(0, 6) == before

    @pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
    def test_ranks_keep_bytes_of_their_own(self, ranks: str) -> None:
        """Two ranks store their shares of the same blocks, under the same keys. A stage of a
        pipeline may have no layer of a group: its blocks have no bytes."""
        sizes: dict[str, Any] = {ranks: 2}
        config = VllmConfig.default(**sizes)
        layers = ("a", "bc") if ranks == "pipeline_parallel_size" else ("abc", "abc")
        workers = [
            Worker(self.kv_cache().of_layers(own), self.store, self.options, config.with_rank(rank))
            for rank, own in enumerate(layers)
        ]
        for group in (0, 1):
            held = [worker.fill(group, 0) for worker in workers]
            for worker in workers:
                worker.store(group, [self.keys[0]])
            for worker, content in zip(workers, held, strict=True):
                assert worker.load(group, [self.keys[0]], first=4)
                assert worker.read(group, 4) == content, f"group {group}: another rank's bytes"
        for worker in workers:
            worker.transfers.close()

    # The scheduler's half

    def test_it_finds_what_it_was_given(self, scheduler: KVTier) -> None:
        offered = [(0, _digest(number)) for number in range(4)] + [(1, _digest(0))]
        kept = set(scheduler.evicted(offered))
        assert kept <= set(offered)
        for group, number in ((0, 4), (1, 1)):
            digests = [_digest(number) for number in range(number)]
            there = [(group, digest) in kept for digest in digests]
            leading = there.index(False) if False in there else number
            assert scheduler.find(group, digests) == leading
            assert scheduler.find(group, [_digest(77), *digests]) == 0
        assert scheduler.find(0, []) == 0

    def test_what_has_failed_is_not_found(self, scheduler: KVTier) -> None:
        kept = scheduler.evicted([(0, _digest(1)), (0, _digest(2))])
        assert kept, "it keeps nothing at all"
        scheduler.load(0, [kept[0][1]])
        scheduler.failed(0, [kept[0][1]])
        assert scheduler.find(0, [kept[0][1]]) == 0
        scheduler.failed(0, [_digest(99)])

    def test_reset_forgets_all(self, scheduler: KVTier) -> None:
        kept = scheduler.evicted([(0, _digest(1)), (1, _digest(2))])
        scheduler.reset()
        assert [scheduler.find(group, [digest]) for group, digest in kept] == [0] * len(kept)

    def test_both_halves_agree(self, scheduler: KVTier, worker: Worker) -> None:
        """More than it has room for comes, some of it again: what the scheduler's half finds, the
        worker's half has."""
        rng = random.Random(0)  # nosec B311
        held: dict[tuple[int, bytes], bytes] = {}
        for _ in range(60):
            blocks = {(rng.randrange(2), _digest(rng.randrange(200))): b for b in range(4)}
            for (group, digest), block in blocks.items():
                if (group, digest) in held:
                    worker.write(group, block, held[group, digest])
                else:
                    held[group, digest] = worker.fill(group, block)
            kept = scheduler.evicted(list(blocks))
            for dropped_block in scheduler.dropped():
                worker.drop(*dropped_block)
            for group, digest in kept:
                worker.store(group, [digest], first=blocks[group, digest])
            group, digest = rng.choice(list(held))
            if scheduler.find(group, [digest]):
                scheduler.load(group, [digest])
                assert worker.load(group, [digest], first=7)
                assert worker.read(group, 7) == held[group, digest]

    def test_its_module_imports_no_torch(self) -> None:
        """The engine's process may run without."""
        if self.tier is None:
            pytest.skip("it has no half in the scheduler")
        code = f"import sys, {self.tier.__module__}; sys.exit('torch' in sys.modules)"
        path = os.pathsep.join(path for path in sys.path if path)
        # The words are our own.
        ran = subprocess.run(  # nosec B603
            [sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": path}
        )
        assert ran.returncode == 0, f"{self.tier.__module__} imports torch, or fails"

    @pytest.fixture
    def scheduler(self) -> KVTier:
        if self.tier is None:
            pytest.skip("it has no half in the scheduler")
        return self.tier(VllmConfig.default(), self.kv_cache(), options=self.options)


class Worker:
    """A store, and blocks on a device."""

    _seeds = count(1)
    """Each worker's bytes are others."""

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        store: type[KVTierStore],
        options: Any,
        config: VllmConfig | None = None,
    ) -> None:
        """`config`: that of a rank; None: of an engine with one."""
        self.cache = KVCache(kv_cache, torch.device("cpu"))
        made = store(config or VllmConfig.default(), kv_cache, options=options)
        self.transfers = Transfers(self.cache, {"mine": made})
        self._random = random.Random(next(self._seeds))  # nosec B311
        self._tickets = count(1)

    def fill(self, group: int, block: int) -> bytes:
        """Writes new bytes into a block; returns them."""
        content = self._random.randbytes(self.cache.block(group, block).num_bytes)
        self.write(group, block, content)
        return content

    def write(self, group: int, block: int, content: bytes) -> None:
        self.cache.block(group, block).write(content, checked=False)

    def read(self, group: int, block: int) -> bytes:
        """Bytes of a block."""
        target = bytearray(self.cache.block(group, block).num_bytes)
        self.cache.block(group, block).read_into(target)
        return bytes(target)

    def store(self, group: int, keys: Sequence[TierKey], first: int = 0) -> None:
        """Stores a block for each key, from `first` on."""
        blocks = [TierBlock("mine", group, key, first + i) for i, key in enumerate(keys)]
        self.transfers.run(StepPlan(tiers=TierWork(stores=blocks)))

    def drop(self, group: int, key: TierKey) -> None:
        self.transfers.run(StepPlan(tiers=TierWork(dropped=[TierBlock("mine", group, key, -1)])))

    def load(self, group: int, keys: Sequence[TierKey], first: int) -> bool:
        """Loads a block for each key, from `first` on. Returns whether all have arrived."""
        blocks = [TierBlock("mine", group, key, first + i) for i, key in enumerate(keys)]
        ticket = next(self._tickets)
        work = TierWork(loads=[TierLoad(ticket, blocks)], loading=[ticket])
        ended = self.transfers.run(StepPlan(tiers=work))
        until = time.monotonic() + _WAIT
        while ticket not in ended:
            assert time.monotonic() < until, f"a load has not ended within {_WAIT:.0f} s"
            ended = self.transfers.run(StepPlan(tiers=TierWork(loading=[ticket], waits=True)))
        return ended[ticket]
