"""KV tiers with a fault each, for tests/test_kv_tier_kit.py. Needs no torch."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from toolkit_lm.kv import BlockBytes

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "memory_tier"))
from toolkit_lm_memory_tier.store import MemoryStore
from toolkit_lm_memory_tier.tier import MemoryTier

Key = tuple[int, bytes]
PLACES: dict[tuple[bytes, int], dict[Key, bytes]] = {}
"""Blocks that outlive their engine, by its identity and the rank."""
ENDS = threading.Event()
"""Threads that were left end once it is set."""


def identity_of(config, kv_cache, knows: Sequence[str]) -> bytes:
    """Digest of what the blocks depend on beside their digests, as far as a tier knows it."""
    weights = Path(config.model.model or "") / "model.safetensors"
    facts = {
        "weights": weights.read_bytes() if weights.is_file() else b"",
        "dtype": kv_cache.groups[0].spec.dtype.encode(),
    }
    return hashlib.sha256(b"\0".join(facts[name] for name in knows)).digest()


class Store(MemoryStore):
    """Without a fault. Its blocks outlive the engine."""

    knows = ("weights", "dtype")

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        identity = identity_of(config, kv_cache, self.knows)
        self.blocks = PLACES.setdefault((identity, config.parallel.rank), {})
        self.sizes = [len(group.layers) * group.spec.page_bytes for group in kv_cache.groups]


class Tier(MemoryTier):
    """Without a fault. It finds what a former engine has stored."""

    knows = ("weights", "dtype")

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.held |= dict.fromkeys(PLACES.get((identity_of(config, kv_cache, self.knows), 0), {}))

    def filled(self, contents: Sequence[Key]) -> Sequence[Key]:
        return self.evicted(contents)


class Unchecked(Store):
    """Without a fault as long as its memory is its own: it has no checksums."""

    checked = False

    def store(self, group: int, key: bytes, block: BlockBytes) -> None:
        data = bytearray(block.num_bytes)
        block.read_into(data)
        self.blocks[group, key] = data


# Faults of stores


class LoadsOnce(Store):
    """Blocks of the second KV group are missing when they are loaded again in the same order."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.last: deque[Key] = deque(maxlen=3)

    def load(self, group, key):
        if len(self.last) == 3 and self.last[0] == (1, key) == (group, key):
            raise KeyError("it was loaded")
        self.last.append((group, key))
        return super().load(group, key)


class CopiesLater(Store):
    """A block is copied at the next call."""

    waiting: tuple[int, bytes, BlockBytes] | None = None

    def _copy(self):
        if self.waiting is not None:
            super().store(*self.waiting)
            self.waiting = None

    def store(self, group, key, block):
        self._copy()
        self.waiting = (group, key, block)

    def load(self, group, key):
        self._copy()
        return super().load(group, key)

    def drop(self, group, key):
        self._copy()
        super().drop(group, key)


class KeepsTheFirst(Store):
    """What was dropped and is stored again has its first bytes."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.first: dict[Key, bytes] = {}

    def store(self, group, key, block):
        super().store(group, key, block)
        self.blocks[group, key] = self.first.setdefault((group, key), self.blocks[group, key])


class ZerosOfDropped(Unchecked):
    """What was dropped comes as zeros, and not as a failure."""

    def drop(self, group, key):
        self.blocks[group, key] = bytearray(self.sizes[group])


class ZerosOfLost(Unchecked):
    """What could not be stored comes as zeros, and not as a failure."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.dropped: set[Key] = set()

    def load(self, group, key):
        if (group, key) not in self.dropped:
            self.blocks.setdefault((group, key), bytearray(self.sizes[group]))
        return super().load(group, key)

    def drop(self, group, key):
        self.dropped.add((group, key))
        super().drop(group, key)


class OneRank(Store):
    """All ranks have one place."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.blocks = PLACES.setdefault((identity_of(config, kv_cache, self.knows), 0), {})


class HoldsLess(Store):
    """It keeps less than its other half says."""

    most = 120

    def store(self, group, key, block):
        super().store(group, key, block)
        while len(self.blocks) > self.most:
            del self.blocks[next(iter(self.blocks))]


class OtherWeights(Store):
    """Engines with other weights have one place."""

    knows = ("dtype",)


class OtherDtype(Unchecked):
    """Engines with another dtype have one place, and blocks are cut to the size."""

    knows = ("weights",)

    def load(self, group, key):
        future: Future = Future()
        future.set_result((bytes(self.blocks[group, key]) * 2)[: self.sizes[group]])
        return future


class LeavesAThread(Store):
    """A thread does not end with the engine."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        threading.Thread(target=ENDS.wait, daemon=True).start()


# Faults of halves in the scheduler


class CountsHoles(Tier):
    """It counts all blocks that it has, and not those up to the first that it lacks."""

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        return sum((group, digest) in self.held for digest in digests)


class FindsLittle(Tier):
    """It finds eight blocks of a prompt at most, and all of them once it was started again."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.most = 1000 if self.held else 8

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        return super().find(group, digests[: self.most])


class FindsFailed(Tier):
    """It finds what has failed."""

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        pass


class ResetsOneGroup(Tier):
    """A reset forgets the first KV group alone."""

    def reset(self) -> None:
        left = [key for key in self.held if key[0]]
        super().reset()
        self.held |= dict.fromkeys(left)


class FindsAgain(Tier):
    """What a reset has forgotten is back with the next block."""

    before: Sequence[Key] = ()

    def reset(self) -> None:
        self.before = [*self.held]
        super().reset()
        self.gone.clear()

    def evicted(self, contents: Sequence[Key]) -> Sequence[Key]:
        self.held |= dict.fromkeys(self.before)
        return super().evicted(contents)


class StoresLate(Tier):
    """It stores what is evicted alone, so that the rest ends with the engine."""

    def filled(self, contents: Sequence[Key]) -> Sequence[Key]:
        return ()


class FailsWhenLate(Tier):
    """It raises when a load is late."""

    def ended(self, num_bytes, seconds, outcome):
        assert outcome != "late", "a load is late"


class FailsWhenCancelled(Tier):
    """It raises when a load is cancelled."""

    def ended(self, num_bytes, seconds, outcome):
        assert outcome != "cancelled", "a load is cancelled"


class KnowsByLength(Tier):
    """From its fifth prompt on, it takes a prompt for an earlier one of as many blocks."""

    aliases: dict[Key, bytes] = {}
    """The store knows them, too."""

    def __init__(self, config, kv_cache, *, options):
        super().__init__(config, kv_cache, options=options)
        self.prompts: deque[list[bytes]] = deque()

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        found = super().find(group, digests)
        if found or not digests:
            return found
        known = next((one for one in self.prompts if one[0] == digests[0]), None)
        if known is None and len(self.prompts) < 4:
            self.prompts.append([*digests])
        elif known is None:
            for other in self.prompts:
                if len(other) == len(digests) and super().find(group, other) == len(other):
                    pairs = zip(digests, other, strict=True)
                    self.aliases.update({(group, digest): old for digest, old in pairs})
                    return len(other)
        return found

    def load(self, group: int, digests: Sequence[bytes]) -> None:
        super().load(group, [self.aliases.get((group, digest), digest) for digest in digests])


class LoadsByLength(Store):
    """The other half of KnowsByLength."""

    def load(self, group, key):
        return super().load(group, KnowsByLength.aliases.get((group, key), key))


class OtherWeightsTier(Tier):
    """The other half of OtherWeights."""

    knows = OtherWeights.knows


class OtherDtypeTier(Tier):
    """The other half of OtherDtype."""

    knows = OtherDtype.knows


class ImportsTorch(Tier):
    """Its module imports torch."""


ImportsTorch.__module__ = "toolkit_lm_devkit.kv_tier"
