"""Events as they may come: with gaps, twice, too late, or not at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq
from toolkit_lm_router import events
from toolkit_lm_router.described import describe
from toolkit_lm_router.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Followers,
    Following,
    Source,
    address_of,
)
from toolkit_lm_router.fleet import Backend
from toolkit_lm_router.prefixes import TOLD_BYTES, PrefixIndex

pytestmark = pytest.mark.anyio
URL = "http://127.0.0.1:8000"
SOURCE = Source("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558")
DIGESTS = range(4)


@dataclass
class StubReceiver:
    """Receives what the test says."""

    replays: list[int] = field(default_factory=list)
    added: list[Following] = field(default_factory=list)
    dropped: list[Following] = field(default_factory=list)

    def __call__(self, *_: object) -> StubReceiver:
        return self

    def start(self) -> None:
        pass

    close = start

    def add(self, following: Following) -> None:
        self.added.append(following)

    def drop(self, following: Following) -> None:
        self.dropped.append(following)

    def replay(self, following: Following) -> None:
        self.replays.append(following.next)


class Told:
    """A backend whose batches the test makes."""

    def __init__(self, source: Source = SOURCE) -> None:
        self.index = PrefixIndex(100 * TOLD_BYTES, is_told=True)
        self.now = 100.0
        self.followers = Followers(self.index, lambda: self.now)
        self.backend = Backend(URL, 0, 8)
        self.source = source
        self.followers.tend(self.backend, [source])
        self.following = next(iter(self.followers._following[self.backend].values()))

    def batch(self, number: int, *news: object, is_replayed: bool = False) -> None:
        self.followers.received(self.following, number, news, is_replayed=is_replayed)

    def end(self) -> None:
        self.batch(events._END, is_replayed=True)

    def tend(self, num_published: int) -> None:
        told = msgspec.structs.replace(self.source, num_published=num_published)
        self.followers.tend(self.backend, [told])

    @property
    def depth(self) -> int:
        return next((depth for depth, _ in self.index.matches(DIGESTS, 1)), 0)


def stored(*digests: int) -> BlockStored:
    return BlockStored(0, [(digest, 70 + digest) for digest in digests])


@pytest.fixture
def receiver(monkeypatch) -> StubReceiver:
    made = StubReceiver()
    monkeypatch.setattr(events, "Receiver", made)
    return made


async def test_what_was_published_before_is_asked_for(receiver):
    told = Told()
    assert receiver.replays == [0]
    # A batch comes before the answer, which has it too.
    told.batch(2, BlockRemoved([73], 0))
    told.batch(0, AllBlocksCleared(), is_replayed=True)
    told.batch(1, stored(*DIGESTS), is_replayed=True)
    told.batch(2, BlockRemoved([73], 0), is_replayed=True)
    assert told.depth == 3
    told.end()
    told.batch(3, BlockRemoved([72], 0))
    assert (told.depth, told.backend.num_event_gaps, told.following.next) == (2, 0, 4)


async def test_a_gap_is_filled(receiver):
    told = Told()
    told.end()
    told.batch(0, stored(0))
    told.batch(3, stored(3))
    told.batch(4, BlockRemoved([73], 0))
    assert receiver.replays == [0, 1] and told.depth == 1
    for number in (1, 2, 3):
        told.batch(number, stored(number), is_replayed=True)
    told.end()
    assert (told.depth, told.backend.num_event_gaps) == (3, 0)


@pytest.mark.parametrize("source", [SOURCE, Source(SOURCE.endpoint)], ids=["lost", "no replays"])
async def test_after_a_gap_that_stays_only_what_was_sent_counts(receiver, source):
    told = Told(source)
    told.end()
    told.index.add(0, DIGESTS[:2])
    told.batch(0, stored(*DIGESTS))
    assert told.depth == 4
    told.batch(5, stored(9))
    told.end()
    assert (told.depth, told.backend.num_event_gaps) == (2, 1)
    told.batch(6, BlockRemoved([71], 0))
    assert told.depth == 1


async def test_a_batch_that_comes_after_its_replay_changes_nothing(receiver):
    told = Told()
    told.batch(0, stored(*DIGESTS), is_replayed=True)
    told.batch(1, BlockRemoved([73], 0), is_replayed=True)
    told.end()
    told.batch(0, stored(*DIGESTS))
    told.batch(1, BlockRemoved([73], 0))
    assert (told.depth, told.following.next) == (3, 2)
    told.batch(2, BlockRemoved([72], 0))
    assert (told.depth, told.backend.num_event_gaps) == (2, 0)


async def test_an_engine_that_starts_anew_has_nothing(receiver):
    told = Told()
    told.end()
    for number in range(3):
        told.batch(number, stored(*DIGESTS))
    told.batch(1, stored(0))
    assert told.depth == 1


async def test_events_that_stop_are_noticed(receiver):
    told = Told()
    told.end()
    told.index.add(0, DIGESTS[:1])
    told.batch(0, stored(*DIGESTS))
    told.tend(5)
    told.now += 0.9 * events._PATIENCE
    told.tend(6)
    # It may be under way.
    assert (told.depth, told.backend.num_event_gaps) == (4, 0)
    told.now += 0.2 * events._PATIENCE
    told.tend(6)
    assert (told.depth, told.backend.num_event_gaps, told.following.next) == (1, 1, 6)
    told.tend(6)
    assert told.backend.num_event_gaps == 1


async def test_a_replay_under_way_is_waited_for(receiver):
    told = Told()
    # A backend that announces itself is asked twice at once.
    for _ in range(3):
        told.tend(3)
    told.batch(0, stored(0), is_replayed=True)
    told.now += 0.9 * events._PATIENCE
    told.tend(3)
    # Some of it has come since: it goes on.
    told.now += 0.9 * events._PATIENCE
    told.tend(3)
    for number in (1, 2):
        told.batch(number, stored(number), is_replayed=True)
    told.end()
    told.now += events._PATIENCE
    told.tend(3)
    assert (told.depth, told.backend.num_event_gaps, told.following.next) == (3, 0, 3)


async def test_a_replay_without_an_end_holds_up_nothing_for_good(receiver):
    told = Told()
    for number in range(3, events._MOST_HELD + 20):
        told.batch(number, stored(*DIGESTS))
    assert told.depth == 0 and len(told.following.held) == events._MOST_HELD
    for _ in range(2):
        told.tend(5000)
        told.now += events._PATIENCE
    assert told.following.held is None
    told.batch(5000, stored(*DIGESTS))
    assert told.depth == 4


async def test_whoever_leaves_tells_no_more(receiver):
    told = Told()
    assert told.backend.is_followed
    told.followers.leave(told.backend)
    told.batch(0, stored(*DIGESTS))
    assert (told.depth, told.backend.is_followed) == (0, False)
    assert receiver.dropped == receiver.added
    told.tend(0)
    assert told.backend.is_followed and len(receiver.added) == 2
    told.followers.tend(told.backend, [])
    assert not told.backend.is_followed and len(receiver.dropped) == 2


async def test_sources_are_bounded(receiver):
    told = Told()
    many = [Source(f"tcp://127.0.0.1:{port}") for port in range(1, 500)]
    told.followers.tend(told.backend, many)
    assert len(receiver.added) - len(receiver.dropped) == events._MOST_SOURCES


@pytest.mark.parametrize(
    "endpoint, url, expected",
    [
        ("tcp://127.0.0.1:5557", URL, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "http://10.0.0.2:8000", "tcp://10.0.0.2:5557"),
        ("tcp://[::]:5557", "https://gpu1.example/v1", "tcp://gpu1.example:5557"),
        ("tcp://0.0.0.0:5557", "http://[fd00::2]:8000", "tcp://[fd00::2]:5557"),
        ("tcp://[::1]:5557", "http://localhost:8000", "tcp://localhost:5557"),
        # Whatever a backend says, the router connects to its machine.
        ("tcp://10.0.0.9:22", "http://10.0.0.2:8000", "tcp://10.0.0.2:22"),
        ("tcp://10.0.0.9:22", URL, None),
        ("tcp://127.0.0.1:5557", "http://10.0.0.2:8000", None),
        ("ipc:///run/kv", URL, "ipc:///run/kv"),
        ("ipc:///run/kv", "http://10.0.0.2:8000", None),
        ("udp://*:5557", URL, None),
        ("tcp://*:x", URL, None),
        ("", URL, None),
    ],
)
def test_the_router_connects_to_the_backends_own_machine(endpoint, url, expected):
    assert address_of(endpoint, url) == expected


async def test_what_is_no_batch_is_passed_over():
    """Over a real socket: wrong messages, and then a right one."""
    told = asyncio.Event()
    with zmq.Context() as context, context.socket(zmq.XPUB) as pub:
        pub.linger = 0
        port = pub.bind_to_random_port("tcp://127.0.0.1")
        index = PrefixIndex(100 * TOLD_BYTES, is_told=True)
        followers = Followers(index)
        receive = followers._receiver._deliver

        def received(*arguments: object, **more: object) -> None:
            receive(*arguments, **more)
            told.set()

        followers._receiver._deliver = received
        try:
            source = Source(f"tcp://127.0.0.1:{port}", topic="kv")
            followers.tend(Backend(URL, 0, 8), [source])
            # It has subscribed.
            await asyncio.to_thread(pub.recv)
            encode = msgspec.msgpack.encode
            for frames in (
                [b"kv"],
                [b"kv", b"1"],
                [b"kv", b"1", b"x"],
                [b"kv", bytes(8), b"x"],
                [b"kv", bytes(8), encode([1.0, [{"type": "Later"}]])],
                [b"kv", bytes(8), encode([1.0, [{"type": "BlockStored", "prompt_chunks": [[1]]}]])],
                [b"other", bytes(8), encode([1.0, []])],
            ):
                pub.send_multipart(frames)
            event = {"type": "BlockStored", "token_ids": [1], "prompt_chunks": [[2**64 - 1, 7]]}
            pub.send_multipart([b"kv", bytes(8), encode([1.0, [event], 0])])
            async with asyncio.timeout(30):
                await told.wait()
            assert index.matches([2**64 - 1], 1) == [(1, 1)]
        finally:
            followers.close()


def test_what_is_no_prompt_is_not_described():
    for body in (b"", b"[]", b'{"prompt":"short"}', b"\xff", b'{"messages":7}'):
        assert describe("/v1/completions", body) == {}
    long = b'{"prompt":"%b"}' % (b"x" * 300)
    assert (
        len(msgspec.json.decode(describe("/v1/completions", long)["kv_events.prompt"])["chunks"])
        == 2
    )
