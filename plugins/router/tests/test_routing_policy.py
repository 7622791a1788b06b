"""Where requests go: prefixes, sessions, load, and turns between clients."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

import pytest
from toolkit_lm_router.asking import read
from toolkit_lm_router.fairness import FairQueue, QueueFullError, Queues
from toolkit_lm_router.policy import RoutingPolicy, Wanted, mark_of
from toolkit_lm_router.prefixes import (
    CHUNK,
    ENTRY_BYTES,
    TOLD_BYTES,
    Block,
    Hasher,
    PrefixIndex,
    num_bytes,
)


@dataclass
class Stub:
    number: int
    load: int = 0
    has_room: bool = True

    @property
    def mark(self) -> int:
        return mark_of(f"http://10.0.0.{self.number}:8000")


class Choosing:
    """A policy over some stubs."""

    def __init__(self, count: int, **options: Any) -> None:
        self.stubs = [Stub(number) for number in range(count)]
        self.policy = RoutingPolicy(random=random.Random(5), **options)

    def choose(self, wanted: Wanted, without: tuple[int, ...] = ()):
        allowed = sum(1 << stub.number for stub in self.stubs)
        total = sum(stub.load for stub in self.stubs)
        by_number = {stub.number: stub for stub in self.stubs}
        return self.policy.choose(wanted, self.stubs, by_number, allowed, total, without)


def naive_depths(sent: dict[int, list[list[int]]], digests: list[int]) -> dict[int, int]:
    """The longest common prefix with any prompt of each backend."""

    def common(other: list[int]) -> int:
        pairs = zip(digests, other, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(digests), len(other)))

    return {number: max(map(common, prompts)) for number, prompts in sent.items()}


def test_matches_are_the_longest_common_prefixes():
    hasher = Hasher()
    drawing = random.Random(1)
    for _ in range(50):
        index = PrefixIndex(2**20)
        prompts = [
            bytes(drawing.choice(b"ab") for _ in range(6)).replace(b"a", b"x" * CHUNK)
            + b"y" * drawing.randrange(3 * CHUNK)
            for _ in range(12)
        ]
        made = [hasher.digests([prompt]) for prompt in prompts]
        sent: dict[int, list[list[int]]] = {}
        for digests in made[:-1]:
            number = drawing.randrange(5)
            index.add(number, digests)
            sent.setdefault(number, []).append(digests)
        found = {
            number: depth
            for depth, mask in index.matches(made[-1], 0b11111)
            for number in range(5)
            if mask >> number & 1
        }
        expected = {n: depth for n, depth in naive_depths(sent, made[-1]).items() if depth}
        assert found == expected


def test_digests_do_not_depend_on_the_pieces():
    hasher = Hasher()
    text = bytes(range(256)) * 9
    whole = hasher.digests([text])
    assert num_bytes(len(whole)) <= len(text) < num_bytes(len(whole) + 1)
    for size in (1, 7, CHUNK, CHUNK + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert hasher.digests(pieces) == whole
    assert Hasher().digests([text]) != whole


def test_the_index_is_bounded_and_forgets_what_was_used_longest_ago():
    index = PrefixIndex(10 * ENTRY_BYTES)
    for start in range(0, 100, 5):
        index.add(0, range(start, start + 5))
    assert len(index) == 10
    assert index.matches(range(95, 100), 1) == [(5, 1)]
    assert index.matches(range(5), 1) == []
    # A prompt that is longer than the index keeps its beginning.
    index.add(1, range(1000, 1100))
    assert index.matches(range(1000, 1100), 2) == [(10, 2)]
    index.clear(0)
    index.clear(1)
    assert len(index) == 0
    assert index.matches(range(95, 100), 3) == []


def test_short_prompts_are_told_apart():
    hasher = Hasher()
    first, second = (hasher.digests([b"a" * 200, end * 200]) for end in (b"x", b"y"))
    assert len(first) == len(second) == 3
    assert (first[0], first[1:]) == (second[0], [d for d in first[1:] if d not in second])
    assert hasher.digests([b"a" * 200], b"model") != hasher.digests([b"a" * 200], b"other")


class TestTold:
    """What backends tell of their caches."""

    blocks = [Block(0, 0, 70 + i) for i in range(8)]

    def made(self, most: int = 100) -> PrefixIndex:
        return PrefixIndex(most * TOLD_BYTES, is_told=True)

    def tell(self, index: PrefixIndex, backend: int, digests: range) -> None:
        index.stored(backend, [(d, self.blocks[d % 8]) for d in digests])

    def test_blocks_come_and_go(self):
        index = self.made()
        self.tell(index, 1, range(4))
        assert index.matches(range(6), 3) == [(4, 2)]
        index.removed(1, self.blocks[2])
        assert index.matches(range(6), 3) == [(2, 2)]
        # A chunk that it was sent goes, too: the engine has evicted it.
        index.add(0, range(4))
        self.tell(index, 0, range(4))
        index.removed(0, self.blocks[0])
        assert index.matches(range(6), 3) == [(2, 2)]
        index.removed(0, Block(0, 0, 999))
        index.removed(5, self.blocks[0])

    def test_a_block_of_another_engine_still_counts(self):
        index = self.made()
        self.tell(index, 0, range(2))
        index.stored(0, [(d, Block(1, 0, 70 + d)) for d in range(2)])
        index.removed(0, self.blocks[1])
        assert index.matches(range(2), 1) == [(2, 1)]
        index.removed(0, Block(1, 0, 71))
        assert index.matches(range(2), 1) == [(1, 1)]

    def test_what_was_sent_outlives_a_doubt(self):
        index = self.made()
        index.add(0, range(2))
        self.tell(index, 0, range(4))
        index.doubt(0)
        index.doubt(3)
        assert index.matches(range(4), 1) == [(2, 1)]
        # And what is told of it still counts.
        index.removed(0, self.blocks[1])
        assert index.matches(range(4), 1) == [(1, 1)]

    def test_any_order_leaves_nothing_behind(self):
        drawing = random.Random(4)
        index = self.made(most=20)
        for _ in range(3000):
            backend = drawing.randrange(3)
            start = drawing.randrange(60)
            digests = range(start, start + drawing.randrange(9))
            match drawing.randrange(12):
                case 0 | 1 | 2:
                    index.add(backend, digests)
                case 3 | 4 | 5:
                    self.tell(index, backend, digests)
                case 10:
                    index.doubt(backend)
                case 11:
                    index.clear(backend)
                case _:
                    index.removed(backend, drawing.choice(self.blocks))
            assert len(index) <= 3 * 20
            for had in index._had.values():
                pairs = {(d, b) for d, found in had.blocks.items() for b in found.values()}
                assert pairs == {(d, b) for b, found in had.digests.items() for d in found}
                assert had.blocks.keys() <= had.used.keys() and all(had.blocks.values())
        for backend in range(3):
            index.clear(backend)
        assert len(index) == 0 and not index._backends


def test_a_prefix_goes_where_it_has_been():
    choosing = Choosing(8)
    wanted = Wanted(digests=range(10))
    choosing.policy.sent(wanted, 6)
    longer = Wanted(digests=range(12))
    assert choosing.choose(longer) == (6, "prefix", 10)
    # A share below prefix_match does not count.
    other = Wanted(digests=[0, 1, *range(100, 120)])
    assert choosing.choose(other).reason == "load"


def test_a_hot_prefix_leaves_a_backend_that_is_too_busy():
    choosing = Choosing(4)
    wanted = Wanted(digests=range(10))
    choosing.policy.sent(wanted, 2)
    counts = [0] * 4
    for _ in range(400):
        choice = choosing.choose(wanted)
        counts[choice.number] += 1
        choosing.stubs[choice.number].load += 1
        choosing.policy.sent(wanted, choice.number)
    assert max(counts) <= 1.5 * 100 + 5
    # Three are enough to keep each below the bound.
    assert sum(count > 50 for count in counts) >= 3


def test_a_backend_without_room_and_one_that_failed_are_left_out():
    choosing = Choosing(3)
    wanted = Wanted(digests=range(4), session="s")
    choosing.policy.sent(wanted, 1)
    assert choosing.choose(wanted).reason == "session"
    assert choosing.choose(wanted, without=(1,)).number != 1
    choosing.stubs[1].has_room = False
    assert choosing.choose(wanted).number != 1
    for stub in choosing.stubs:
        stub.has_room = False
    assert choosing.choose(wanted) is None


def test_a_session_stays_without_a_prefix():
    choosing = Choosing(16)
    first = choosing.choose(Wanted(session="a"))
    choosing.policy.sent(Wanted(session="a"), first.number)
    assert all(choosing.choose(Wanted(session="a")).number == first.number for _ in range(20))


def test_the_load_of_two_choices_is_even():
    choosing = Choosing(50)
    for _ in range(5000):
        choosing.stubs[choosing.choose(Wanted()).number].load += 1
    # Random choices alone would differ by 40 (three standard deviations each way), two by few.
    loads = [stub.load for stub in choosing.stubs]
    assert max(loads) - min(loads) < 15


class TestAsked:
    hasher = Hasher()

    def read(self, body: bytes, path: str = "/v1/chat/completions", **headers: str):
        return read(path, body, headers, self.hasher)

    def test_a_conversation_that_goes_on_begins_with_the_same_digests(self):
        message = b'{"role":"user","content":"%b"}' % (b"x" * 3000)
        short = self.read(b'{"model":"m","messages":[%b]}' % message)
        long = self.read(b'{"stream":true,"messages":[%b,%b],"model":"m"}' % (message, message))
        assert num_bytes(len(short.wanted.digests)) == 2560
        assert long.wanted.digests[: len(short.wanted.digests)] == short.wanted.digests
        assert (short.is_stream, long.is_stream) == (False, True)
        other = self.read(b'{"model":"n","messages":[%b]}' % message)
        assert not set(other.wanted.digests) & set(short.wanted.digests)

    def test_a_text_that_goes_on(self):
        path = "/v1/completions"
        short = self.read(b'{"prompt":"%b"}' % (b"y" * 2000), path)
        long = self.read(b'{"prompt":"%b"}' % (b"y" * 4000), path)
        assert long.wanted.digests[: len(short.wanted.digests)] == short.wanted.digests
        assert short.wanted.digests

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"7", b'"x"', b"\xff", b'{"messages":7}', b'{"model":{}}', b"[" * 9999],
    )
    def test_what_is_no_body_is_left_to_the_backend(self, body):
        asked = self.read(body)
        assert asked.body == body
        assert (asked.model, asked.is_stream, asked.is_stored) == (None, False, False)

    def test_sessions_and_state(self):
        assert self.read(b'{"user":"u"}').wanted.session == "u"
        assert self.read(b'{"user":"u","prompt_cache_key":"k"}').wanted.session == "k"
        assert self.read(b'{"user":"u"}', **{"x-session-id": "h"}).wanted.session == "h"
        assert self.read(b'{"store":true}').is_stored
        assert self.read(b'{"previous_response_id":"r"}').needs_state == "previous_response_id"
        assert self.read(b'{"previous_response_id":null}').needs_state == ""

    def test_fields_that_are_added_count(self):
        assert self.read(b'{"prompt":"a"} ').with_fields(seed=7) == b'{"prompt":"a","seed":7}'
        asked = self.read(b'{"seed":null,"prompt":"}"}')
        assert not asked.has_seed
        assert json.loads(asked.with_fields(seed=7, x=[1])) == {"x": [1], "prompt": "}", "seed": 7}
        assert self.read(b'{"seed":5}').has_seed


class Places:
    """So many places, which are given in turn."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.given: list[str] = []

    def take(self, name: str):
        def take() -> str | None:
            if not self.free:
                return None
            self.free -= 1
            self.given.append(name)
            return name

        return take

    def give_back(self, name: str) -> None:
        self.free += 1
        self.given.remove(name)


@pytest.mark.anyio
async def test_clients_take_turns():
    queue: FairQueue[str] = FairQueue()
    places = Places(0)
    names = ["many"] * 40 + ["few"] * 4 + ["long"] * 4
    costs = {"many": 16_000, "few": 16_000, "long": 160_000}
    waiting = [
        asyncio.create_task(queue.wait(name, places.take(name), places.give_back, costs[name]))
        for name in names
    ]
    await asyncio.sleep(0)
    for _ in range(12):
        places.free = 1
        queue.serve()
    # A turn each; what is ten times as long waits for ten turns.
    assert places.given[:8] == ["many", "few"] * 4
    assert places.given.count("long") <= 1
    places.free = 100
    queue.serve()
    await asyncio.gather(*waiting)
    assert len(queue) == 0
    assert places.given.count("long") == 4


@pytest.mark.anyio
async def test_whoever_leaves_the_queue_takes_no_place():
    queues: Queues[str] = Queues(2, 60.0)
    places = Places(1)
    assert await queues.place(None, "a", places.take("a"), places.give_back, 1) == "a"
    waiting = [
        asyncio.create_task(queues.place(None, "b", places.take(name), places.give_back, 1))
        for name in ("b", "c")
    ]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await queues.place(None, "d", places.take("d"), places.give_back, 1)
    waiting[0].cancel()
    await asyncio.gather(*waiting[:1], return_exceptions=True)
    places.free = 1
    queues.serve()
    assert await waiting[1] == "c"
    assert (len(queues), places.free) == (0, 0)


@pytest.mark.anyio
async def test_a_place_that_comes_too_late_is_given_back():
    queues: Queues[str] = Queues(2, 60.0)
    places = Places(0)
    waiting = asyncio.create_task(queues.place(None, "a", places.take("a"), places.give_back, 1))
    await asyncio.sleep(0)
    places.free = 1
    queues.serve()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (places.free, places.given) == (1, [])


@pytest.mark.anyio
async def test_a_request_waits_for_so_long():
    queues: Queues[str] = Queues(2, 0.01)
    places = Places(0)
    with pytest.raises(TimeoutError):
        await queues.place(None, "a", places.take("a"), places.give_back, 1)
    assert len(queues) == 0


@pytest.mark.anyio
async def test_a_picky_request_does_not_hold_up_others():
    queue: FairQueue[str] = FairQueue()
    places = Places(0)
    picky = asyncio.create_task(
        queue.wait("a", lambda: None, places.give_back, cost=1, is_picky=True)
    )
    other = asyncio.create_task(queue.wait("b", places.take("b"), places.give_back, cost=1))
    await asyncio.sleep(0)
    places.free = 1
    queue.serve()
    assert await other == "b"
    picky.cancel()
