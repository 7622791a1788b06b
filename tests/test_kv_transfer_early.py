"""Blocks that are fetched while a peer computes them, and memory that both share: the answers are
those of one engine, and whatever fails on the way is computed at once."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kv_transfers import (
    LOUD,
    OFFER,
    PROMPTS,
    SECRET,
    SEEDED,
    THREADS,
    Liar,
    alone,
    decode,
    engine,
    failures,
    idle,
    make_hybrid,
    pair,
    prefill,
    store_of,
    stores_of,
    tier_of,
)
from ports import free_port
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_kv_transfer.arena import Arena, SharedMemory
from toolkit_lm_kv_transfer.client import Client, Patience
from toolkit_lm_kv_transfer.held import Held
from toolkit_lm_kv_transfer.server import Server
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.share import ARRAY, RankCounts
from toolkit_lm_kv_transfer.wire import HEAD_BYTES, MOST_KEYS, ArenaName

EARLY = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "a"}
LONG: dict[str, Any] = {"timeout": 60, "lease": 600}
"""Nothing ends by itself while a test runs."""


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def llama(make_llama):
    return make_llama("kv_disk", head_dim=32)[0]


class Both:
    """A prefill engine and a decode engine that have the same request, and take turns."""

    def __init__(
        self, first: LLM, second: LLM, prompt: Any, *, early: bool = True, **params: Any
    ) -> None:
        """`early`: the decode engine has it from the beginning."""
        self.first = first
        self.second = second
        self.prompt = prompt
        self.sampling = {**LOUD, **params}
        self.transfer: Any = None
        """What the prefill answers."""
        self.output: Any = None
        if early:
            self.ask(EARLY)
        self._add(first, OFFER, max_tokens=1, n=1)

    def ask(self, transfer: Any) -> None:
        """The decode engine gets the request."""
        self._add(self.second, transfer)

    def _add(self, llm: LLM, transfer: Any, **more: Any) -> None:
        args = {"kv_transfer_params": transfer}
        sampling = SamplingParams(**{**self.sampling, **more}, extra_args=args)
        llm.engine.add_request("x", self.prompt, sampling)

    def prefill(self) -> None:
        """One step of the prefill engine."""
        if self.first.engine.client.core.has_unfinished:
            for output in self.first.engine.step():
                if output.finished and ARRAY in output.outputs[0].arrays:
                    self.transfer = json.loads(output.outputs[0].arrays[ARRAY].tobytes())

    def decode(self) -> None:
        """One step of the decode engine."""
        for output in self.second.engine.step():
            if output.finished:
                self.output = output

    def until(self, done: Callable[[], Any], *, prefills: bool = False) -> None:
        """Steps until something is so; fails after 30 seconds."""
        end = time.monotonic() + 30
        while not done():
            assert time.monotonic() < end, "it never comes"
            if prefills:
                self.prefill()
            self.decode()

    def answer(self, *, prefills: bool = True) -> tuple[Any, int]:
        """What `decode` gives for the request."""
        self.until(lambda: self.output is not None, prefills=prefills)
        assert not self.output.error, self.output.error
        return [
            [
                (token, sorted((key, value.logprob) for key, value in entry.items()))
                for token, entry in zip(each.token_ids, each.logprobs, strict=True)
            ]
            for each in self.output.outputs
        ], self.output.num_cached_tokens

    def fetched(self) -> int:
        return store_of(self.second).counts().fetched_blocks


def wait_for_memory(first: LLM) -> None:
    """Returns once a peer shares the memory of an engine."""
    end = time.monotonic() + 30
    while not store_of(first)._held.shares:
        assert time.monotonic() < end, "no memory is shared"
        time.sleep(0.01)


def check_idle(first: LLM, second: LLM) -> None:
    """Nothing is left of any transfer."""
    for llm in (first, second):
        idle(llm)
        tier = tier_of(llm)
        assert not tier._announced and not tier._wanted and not tier._once
        assert llm.engine.client.core.scheduler.blocks.num_used == 0
        planner = llm.engine.client.core.scheduler.planners.by_name["kv_transfer"]
        assert not planner._offers and not planner._fetches
    servers = [store._server for store in stores_of(first)]
    clients = [store._client for store in stores_of(second)]
    end = time.monotonic() + 10
    while any(s._coming or s._takers for s in servers) or any(c._wanted for c in clients):
        assert time.monotonic() < end, "something waits"
        time.sleep(0.01)
    assert not any(s._num_coming or s._num_takers for s in servers)


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {},
    "hybrid": {},
    "int8": {"kv_cache_dtype": "int8"},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "overlap": {"overlap": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_engine(request, kind, llama, make_windowed, tmp_path):
    """Bit for bit what an engine answers that has the prompt's blocks."""
    models = {
        "window": lambda: make_windowed()[0],
        "hybrid": lambda: make_hybrid(tmp_path / "hybrid"),
    }
    model = models.get(kind, lambda: llama)()
    more = dict(KINDS[kind])
    if kind in ("tensor", "pipeline"):
        more |= {"plugins": [THREADS], "executor": "threads"}
    ways: list[dict[str, Any]] = [{}, SEEDED, {**SEEDED, "n": 2}]
    with engine(model, **more) as llm:
        warm = []
        for number, way in enumerate(ways):
            decode(llm, PROMPTS[number], None, **way)
            warm.append(decode(llm, PROMPTS[number], None, **way))
    with pair(model, own=LONG, **more) as (first, second):
        for number, way in enumerate(ways):
            assert Both(first, second, PROMPTS[number], **way).answer() == warm[number]
            assert tier_of(second).counts.loads == {"loaded": number + 1}
            assert warm[number][1] > 40
        check_idle(first, second)


@pytest.mark.parametrize("shares", [True, False])
def test_blocks_move_while_later_ones_are_computed(llama, monkeypatch, shares):
    """After each chunk of the prompt, through memory where that can be shared."""
    if not shares:
        monkeypatch.setattr(SharedMemory, "__init__", refuse)
    with engine(llama) as llm:
        decode(llm, PROMPTS[0], None)
        warm = decode(llm, PROMPTS[0], None)
    with pair(llama, own=LONG) as (first, second):
        if shares:
            wait_for_memory(first)
        both = Both(first, second, PROMPTS[0])
        # 70 tokens: chunks of 32, 32 and 6. A step offers what the one before it has filled.
        for count in (0, 8, 16):
            both.prefill()
            both.until(lambda count=count: both.fetched() == count)
            assert both.output is None
        assert both.answer() == warm
        counts = store_of(second).counts()
        assert counts.fetched_blocks == warm[1] // 4
        assert counts.shared_blocks == (counts.fetched_blocks if shares else 0)
        check_idle(first, second)
        assert store_of(first).counts().held_bytes == 0


def test_last_blocks_that_are_stored_late(llama, monkeypatch):
    """A prefill answers before its last blocks are stored: a peer that asks at once waits."""
    monkeypatch.setattr("toolkit_lm_kv_transfer.server._PATIENCE", 0.0)
    with engine(llama) as llm:
        decode(llm, PROMPTS[0], None)
        warm = decode(llm, PROMPTS[0], None)
    with pair(llama, own=LONG) as (first, second):
        both = Both(first, second, PROMPTS[0], early=False)
        while both.transfer is None:
            both.prefill()
        stored = store_of(first).counts().held_blocks
        assert stored < warm[1] // 4
        both.ask(both.transfer)
        both.until(lambda: both.fetched() == stored)
        assert both.answer() == warm
        assert tier_of(second).counts.loads == {"loaded": 1}
        check_idle(first, second)


def refuse(self, name):
    raise OSError("another machine")


# Failures on the way


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_prefill_that_is_aborted(llama, num_steps):
    """The request that waits for it computes itself at once."""
    expected = alone(llama, PROMPTS[0])
    with pair(llama, own=LONG) as (first, second):
        both = Both(first, second, PROMPTS[0])
        for _ in range(num_steps):
            both.prefill()
            both.decode()
        first.engine.abort("x")
        answer = both.answer()
        tokens = [[token for token, _ in each] for each in answer[0]]
        assert tokens == [[token for token, _ in each] for each in expected[0]]
        # Who is aborted at its end has offered all.
        if num_steps < 3:
            assert answer == expected
            assert tier_of(second).counts.loads == {"failed": 1}
        check_idle(first, second)


@pytest.mark.parametrize("num_steps", range(5))
def test_a_decode_that_is_aborted(llama, num_steps):
    """The prefill goes on, and both are as before: the next transfer is whole."""
    with pair(llama, own=LONG) as (first, second):
        both = Both(first, second, PROMPTS[0])
        for _ in range(num_steps):
            both.prefill()
            both.decode()
        second.engine.abort("x")
        for _ in range(8):
            both.prefill()
        check_idle(first, second)
        loaded = tier_of(second).counts.loads.get("loaded", 0)
        Both(first, second, PROMPTS[1]).answer()
        assert tier_of(second).counts.loads["loaded"] == loaded + 1
        check_idle(first, second)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_prefill_engine_that_ends(llama, num_steps):
    """Its blocks are computed, without waiting for a lease."""
    expected = alone(llama, PROMPTS[0])
    with pair(llama, own=LONG) as (first, second):
        both = Both(first, second, PROMPTS[0])
        for _ in range(num_steps):
            both.prefill()
            both.decode()
        first.close()
        assert both.answer(prefills=False) == expected
        assert tier_of(second).counts.loads == {"failed": 1}
        assert second.engine.client.core.scheduler.blocks.num_used == 0


def test_a_prefill_that_never_begins(llama):
    expected = alone(llama, PROMPTS[0])
    with pair(llama, own={"timeout": 0.7}) as (first, second):
        assert decode(second, PROMPTS[0], EARLY) == expected
        assert tier_of(second).counts.loads == {"failed": 1}
        assert failures(second).keys() == {"late"}
        check_idle(first, second)


def test_a_prefill_that_hangs(llama):
    """A peer that says it computes blocks, and brings none, is given up after a lease."""
    expected = alone(llama, PROMPTS[0])
    with pair(llama, own={"timeout": 0.2, "lease": 2.5}) as (first, second):
        both = Both(first, second, PROMPTS[0])
        both.prefill()
        both.prefill()
        assert both.answer(prefills=False) == expected
        assert failures(second).keys() == {"late"}
        first.engine.abort("x")
        check_idle(first, second)


def test_a_prefill_that_is_computed_again(llama, monkeypatch):
    """A step that fails on the prefill engine is repeated, and the transfer goes on."""
    with engine(llama) as llm:
        decode(llm, PROMPTS[0], None)
        warm = decode(llm, PROMPTS[0], None)
    with pair(llama, own=LONG) as (first, second):
        both = Both(first, second, PROMPTS[0])
        executor = first.engine.client.core.executor
        execute = executor.execute
        plans: list[Any] = []

        def fail_first(plan: Any) -> Any:
            plans.append(plan)
            if len(plans) == 1:
                raise RuntimeError("a step fails")
            return execute(plan)

        monkeypatch.setattr(executor, "execute", fail_first)
        assert both.answer() == warm
        assert tier_of(second).counts.loads == {"loaded": 1}
        check_idle(first, second)


def test_two_prompts_that_are_one(llama):
    """Each transfer gets its own."""
    with pair(llama, own=LONG) as (first, second):
        both = Both(first, second, PROMPTS[0])
        first.engine.add_request(
            "y",
            PROMPTS[0],
            SamplingParams(**{**LOUD, "max_tokens": 1}, extra_args={"kv_transfer_params": OFFER}),
        )
        found = both.answer()
        second.reset_prefix_cache()
        idle(first)
        again = decode(second, PROMPTS[0], EARLY)
        assert again == found
        assert tier_of(second).counts.loads == {"loaded": 2}
        check_idle(first, second)


# Shared memory


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, 1_000_003])
def test_blocks_of_any_size(monkeypatch, size, shares):
    """Those of large models, too: what encryption adds counts in the bound of a frame."""
    if not shares:
        monkeypatch.setattr(SharedMemory, "__init__", refuse)
    keys = [(0, bytes([number] * 32)) for number in range(MOST_KEYS // 4)]
    address = Address("127.0.0.1", free_port())
    held = Held(2**28, lease=60.0)
    identity = secret = bytes(32)
    server = Server(address, secret, identity, held, RankCounts())
    counts = RankCounts()
    client = Client([address], secret, identity, [size], Patience(30.0, 60.0), counts)
    end = time.monotonic() + 30
    while not (counts.reachable_peers and held.shares == shares):
        assert time.monotonic() < end, "nobody answers"
        time.sleep(0.01)
    for number, key in enumerate(keys):
        room = held.make_room(size)
        assert room is not None
        room.data[:] = bytes([number]) * size
        held.put(key, room, time.monotonic())
    found = [client.fetch(key) for key in keys]
    for number, future in enumerate(found):
        assert bytes(future.result(30)) == bytes([number]) * size
    assert counts.shared_blocks == (len(keys) if shares and size else 0)
    client.close()
    server.close()


def test_damage_in_shared_memory_is_found(llama, monkeypatch):
    expected = alone(llama, PROMPTS[0])
    read = SharedMemory.read

    def damaged(self: SharedMemory, place: int, num_bytes: int) -> bytes:
        data = bytearray(read(self, place, num_bytes))
        data[-1] ^= 1
        return bytes(data)

    with pair(llama, own=LONG) as (first, second):
        wait_for_memory(first)
        transfer = prefill(first, PROMPTS[0])
        monkeypatch.setattr(SharedMemory, "read", damaged)
        assert decode(second, PROMPTS[0], transfer) == expected
        assert tier_of(second).counts.loads == {"failed": 1}
        assert failures(second).keys() == {"damaged"}
        check_idle(first, second)


def test_a_liar_names_a_file_that_is_no_arena(llama, tmp_path):
    """Nothing of it is read: blocks come over TCP."""
    secrets = tmp_path / "secrets"
    secrets.write_bytes(bytes(range(256)) * 64)
    with secrets.open("rb") as file:
        liar = Liar({})
        liar.arena = ArenaName(os.getpid(), file.fileno(), bytes(range(32)))
        try:
            with engine(llama, {"peers": [str(liar.address)], "timeout": 0.5}) as llm:
                client = store_of(llm)._client
                end = time.monotonic() + 10
                while client._peers[0].arena is None:
                    assert time.monotonic() < end, "the arena is not told"
                    time.sleep(0.01)
                assert client._peers[0].memory is None
        finally:
            liar.close()


@contextmanager
def arena(num_bytes: int) -> Iterator[Arena]:
    made = Arena(num_bytes)
    yield made
    made.close()


def test_an_arena_is_read_by_its_name_alone(tmp_path):
    with arena(10_000) as made:
        place = made.allocate(100)
        made.at(place, 100)[:] = bytes(range(100))
        shared = SharedMemory(made.name)
        assert shared.read(place, 100) == bytes(range(100))
        # A reader cannot be made to read beyond.
        assert len(shared.read(2**40, 100)) == 0
        assert len(shared.read(mmap.PAGESIZE + 10_000, 10_000)) < 10_000
        other = ArenaName(made.name.pid, made.name.file, bytes(32))
        with pytest.raises(ValueError, match="another arena"):
            SharedMemory(other)
        with pytest.raises(OSError, match="not permitted"):
            # Who opens it reads.
            os.ftruncate(made.name.file, 1)
        shared.close()
    with open(os.devnull, "rb") as device, pytest.raises(ValueError, match="is no file"):
        SharedMemory(ArenaName(os.getpid(), device.fileno(), bytes(32)))


def test_places_are_used_again():
    with arena(1000) as made:
        places = [made.allocate(100) for _ in range(7)]
        assert None not in places and len(set(places)) == 7
        assert made.allocate(200) is None
        made.give_back(places[3], 100)
        assert made.allocate(100) == places[3]
        for place in places:
            made.give_back(place, 100)
        # Other sizes have room again, once all is free.
        assert made.allocate(800) is not None


def test_memory_goes_back_to_the_system():
    with arena(2**22) as made:
        place = made.allocate(2**22)
        made.at(place, 2**22)[:] = b"x" * 2**22
        full = os.fstat(made.name.file).st_blocks
        made.trim()
        assert os.fstat(made.name.file).st_blocks == full, "it is in use"
        made.give_back(place, 2**22)
        made.trim()
        assert os.fstat(made.name.file).st_blocks * 512 < 2**16


def test_a_server_that_is_killed_leaves_no_file():
    """A reader keeps what it has opened, and nobody else finds it."""
    code = (
        "import sys; from toolkit_lm_kv_transfer.arena import Arena; a = Arena(4096); "
        "n = a.name; a.at(a.allocate(4), 4)[:] = b'abcd'; "
        "print(n.pid, n.file, n.token.hex(), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid, file, token = process.stdout.readline().split()
        name = ArenaName(int(pid), int(file), bytes.fromhex(token))
        shared = SharedMemory(name)
        process.kill()
        process.wait()
    assert shared.read(mmap.PAGESIZE, 4) == b"abcd"
    with pytest.raises(OSError, match="No such file"):
        SharedMemory(name)
    shared.close()


def test_lent_places_are_kept_until_they_are_given_back():
    held = Held(1000, lease=10.0)
    held.shares = True
    key = (0, bytes(32))
    room = held.make_room(600)
    assert room is not None and room.place is not None
    held.put(key, room, now=0.0)
    loan = held.read(key, 1.0, lends=True)
    assert loan is not None and loan.place == room.place
    assert key not in held and held.num_bytes == 600
    assert held.make_room(600) is None, "the budget covers what is lent"
    held.give_back(loan.number)
    held.give_back(loan.number)
    assert held.num_bytes == 0
    room = held.make_room(600)
    held.put(key, room, now=2.0)
    held.read(key, 3.0, lends=True)
    # A reader that has died gives nothing back.
    held.expire(12.0)
    assert held.num_bytes == 600
    held.expire(13.5)
    assert held.num_bytes == 0
    held.close()
