"""The order in which a block pool evicts contents, and orders of others."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from toolkit_lm.kv import BlockPool, FreeBlocks


class Plain:
    """The order of a pool that retains nothing, in few words: blocks without contents first, then
    the least recently used."""

    def __init__(self, count):
        self.free = OrderedDict.fromkeys(range(count))

    def release(self, block, known):
        self.free[block] = None
        if not known:
            self.free.move_to_end(block, last=False)


@pytest.mark.parametrize("seed", range(5))
def test_without_marks_the_order_is_that_of_use(seed):
    numbers = random.Random(seed)
    pool = BlockPool(12)
    plain = Plain(12)
    owned = []
    keys = {}
    for number in range(600):
        action = numbers.choice(("allocate", "allocate", "release", "publish", "share"))
        if action == "allocate" and pool.num_free:
            wanted, _ = plain.free.popitem(last=False)
            owned.append(pool.allocate())
            assert owned[-1] == wanted
            keys = {key: block for key, block in keys.items() if block != wanted}
        elif action == "release" and owned:
            block = owned.pop(numbers.randrange(len(owned)))
            pool.release(block)
            plain.release(block, block in keys.values())
        elif action == "publish" and owned and pool.publish(number, block := owned[-1]):
            keys[number] = block
        elif action == "share":
            for key, block in keys.items():
                if block in plain.free:
                    assert pool.find(key) == block
                    pool.share(block)
                    del plain.free[block]
                    owned.append(block)
                    break
        assert pool.num_free == len(plain.free) and pool.num_used == 12 - pool.num_free


def cached(pool, *keys):
    """Allocates a block for each key, and frees it with these contents."""
    blocks = [pool.allocate() for _ in keys]
    for key, block in zip(keys, blocks, strict=True):
        assert pool.publish(key, block)
    for block in blocks:
        pool.release(block)


def evicted(pool, count):
    """The contents that leave as so many blocks are allocated."""
    gone = []
    pool.on_evicted = lambda key, block: gone.append(key)
    blocks = [pool.allocate() for _ in range(count)]
    pool.on_evicted = None
    return gone, blocks


class Newest(FreeBlocks):
    """Another order: the most recently used first, but for blocks without contents."""

    def pop_next(self):
        block = next(reversed(self))
        self.remove(block)
        return block


def test_a_pool_has_another_order():
    pool = BlockPool(5)
    cached(pool, *"abcd")
    pool.order_by(Newest())
    assert pool.num_free == 5 and pool.num_cached == 4
    cached(pool, "e")
    for key in "bc":
        if (block := pool.find(key)) is not None:
            pool.share(block)
            pool.release(block)
    newest = next(key for key in "cbe" if pool.find(key) is not None)
    assert evicted(pool, 1)[0] == [newest]
    pool.reset()
    cached(pool, *"fg")
    assert isinstance(pool._free, Newest)


def test_forgotten_contents_are_overwritten_first():
    pool = BlockPool(3)
    cached(pool, *"abc")
    block = pool.find("c")
    pool.forget(block)
    assert pool.num_free == 3 and pool.num_cached == 2
    assert pool.allocate() == block
    assert pool.num_cached == 2


@pytest.mark.parametrize("forget", ["one", "all", "reset"])
def test_forgotten_contents_are_no_longer_found(forget):
    pool = BlockPool(3)
    cached(pool, *"abc")
    if forget == "one":
        pool.forget(pool.find("a"))
    elif forget == "all":
        pool.forget_all()
    else:
        pool.reset()
    assert pool.num_free == 3 and pool.find("a") is None
    assert evicted(pool, 3)[0] == ([*"bc"] if forget == "one" else [])
    assert pool.num_cached == 0
