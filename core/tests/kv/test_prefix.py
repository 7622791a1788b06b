"""PrefixHashes: which blocks hold the same keys and values."""

from __future__ import annotations

import pytest
from toolkit_lm.kv.prefix import PrefixHashes
from toolkit_lm.messages import CacheKey

TOKENS = list(range(16))


def hashes(*keys: CacheKey, salt: str = "plugins", tokens=TOKENS) -> list[bytes]:
    return PrefixHashes(salt, keys).block_hashes(tokens, 4, 4)


def num_shared(some: list[bytes], others: list[bytes]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))


def test_a_hash_is_over_all_tokens_up_to_the_block_s_end():
    assert hashes() == hashes()
    assert num_shared(hashes(), hashes(tokens=[*TOKENS[:5], 99, *TOKENS[6:]])) == 1
    assert num_shared(hashes(), hashes(salt="other plugins")) == 0
    assert len(set(hashes())) == 4


@pytest.mark.parametrize(
    ("start", "end", "shared"),
    [(0, 1, 0), (3, 4, 0), (4, 5, 1), (5, 11, 1), (8, 16, 2), (15, 16, 3), (16, 20, 4)],
)
def test_what_a_key_touches_and_what_follows_is_not_shared(start, end, shared):
    assert num_shared(hashes(), hashes(CacheKey(start, end, "a"))) == shared
    assert (
        num_shared(hashes(CacheKey(start, end, "b")), hashes(CacheKey(start, end, "a"))) == shared
    )
    assert num_shared(hashes(CacheKey(start, end, "a")), hashes(CacheKey(start, end, "a"))) == 4


def test_two_pictures_under_equal_tokens():
    """The first is the same; where the second differs, sharing ends."""
    cat = CacheKey(2, 4, "cat")
    dog = CacheKey(9, 12, "dog")
    bird = CacheKey(9, 12, "bird")
    assert num_shared(hashes(cat, dog), hashes(cat, bird)) == 2
    assert num_shared(hashes(cat, dog), hashes(dog)) == 0


def test_a_fork_goes_on_from_the_same_hashes():
    parent = PrefixHashes("plugins", [CacheKey(9, 10, "a")])
    first = list(parent.block_hashes(TOKENS, 4, 2))
    child = parent.fork()
    assert child.block_hashes(TOKENS, 4, 4) == hashes(CacheKey(9, 10, "a"))
    assert parent.block_hashes(TOKENS, 4, 2) == first
