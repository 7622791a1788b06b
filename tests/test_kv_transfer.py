"""Prefill on one engine and decode on another: the answers are those of one engine, and whatever
fails on the way is computed."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any
from zlib import crc32

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
    prompts,
    store_of,
    tier_of,
)
from ports import free_port
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.wire import Block, Get, encode


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def llama(make_llama):
    return make_llama("kv_disk", head_dim=32)[0]


@pytest.fixture
def hybrid(tmp_path):
    return make_hybrid(tmp_path / "hybrid")


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {},
    "hybrid": {},
    "int8": {"kv_cache_dtype": "int8"},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "overlap": {"overlap": True},
}
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "seed": SEEDED, "n": {**SEEDED, "n": 2}}


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_engine(request, kind, llama):
    """Bit for bit what an engine answers that has the prompt's blocks, and the tokens of one that
    has not."""
    model = llama
    if kind == "window":
        model = request.getfixturevalue("make_windowed")()[0]
    elif kind == "hybrid":
        model = request.getfixturevalue("hybrid")
    more = dict(KINDS[kind])
    if kind in ("tensor", "pipeline"):
        more |= {"plugins": [THREADS], "executor": "threads"}
    with engine(model, **more) as llm:
        cold = {}
        warm = {}
        for number, prompt in enumerate(PROMPTS):
            for way, params in WAYS.items():
                llm.reset_prefix_cache()
                cold[number, way] = decode(llm, prompt, None, **params)
                warm[number, way] = decode(llm, prompt, None, **params)
    with pair(model, host="127.0.0.2", **more) as (first, second):
        for count, ((number, way), (answer, cached)) in enumerate(warm.items(), 1):
            second.reset_prefix_cache()
            transfer = prefill(first, PROMPTS[number], **WAYS[way])
            assert transfer["do_remote_prefill"] and transfer["remote_host"] == "127.0.0.2"
            found = decode(second, PROMPTS[number], transfer, **WAYS[way])
            assert tier_of(second).counts.loads == {"loaded": count}
            assert found == (answer, cached)
            assert cached > 40
            tokens = [[token for token, _ in each] for each in cold[number, way][0]]
            assert [[token for token, _ in each] for each in found[0]] == tokens
        assert second.engine.client.core.scheduler.blocks.num_used == 0
        assert not tier_of(second)._announced


# Peers that fail


def damaged(question: Get) -> Iterator[list[bytes]]:
    for group, digest in question.keys:
        yield [encode(Block(group, digest, True, 1)), bytes(4096)]


def cut(question: Get) -> Iterator[list[bytes]]:
    for group, digest in question.keys:
        yield [encode(Block(group, digest, True, crc32(bytes(100)))), bytes(100)]


def others(question: Get) -> Iterator[list[bytes]]:
    for group, digest in question.keys:
        yield [encode(Block(group, digest[::-1], True, crc32(bytes(4096)))), bytes(4096)]


def lost(question: Get) -> Iterator[list[bytes]]:
    for group, digest in question.keys:
        yield [encode(Block(group, digest, False, 0)), b""]


def babble(question: Get) -> Iterator[list[bytes]]:
    yield [b"\xc1\xff", b"x"]


def silence(question: Get) -> Iterator[list[bytes]]:
    yield from ()


def outside(question: Get) -> Iterator[list[bytes]]:
    for group, digest in question.keys:
        yield [encode(Block(group, digest, True, crc32(bytes(4096)), 2**40, 1)), b""]


LIES = {
    "outside": (outside, "damaged"),
    "damaged": (damaged, "damaged"),
    "cut": (cut, "damaged"),
    "others": (others, "late"),
    "lost": (lost, "missing"),
    "babble": (babble, "late"),
    "silence": (silence, "late"),
}


def announced(llm: LLM, prompt: Any, address: Address) -> dict[str, Any]:
    """Params for a prompt's blocks, as if a peer had them."""
    from toolkit_lm_kv_transfer.share import short

    core = llm.engine.client.core
    ids: list[int] = []
    # Digests are those that an engine of the same options publishes.
    core.scheduler.blocks.pools[0].on_published = lambda key, block: ids.append(short(key[1]))
    decode(llm, prompt, None)
    llm.reset_prefix_cache()
    return {
        "do_remote_prefill": True,
        "remote_host": address.host,
        "remote_port": address.port,
        "remote_block_ids": [ids],
    }


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_costs_no_token(llama, lie):
    """Its blocks are computed, and the failure is counted."""
    expected = alone(llama, PROMPTS[0])
    answer, reason = LIES[lie]
    liar = Liar({})
    liar.answer = answer
    try:
        with engine(llama, {"peers": [str(liar.address)], "timeout": 0.5}) as llm:
            transfer = announced(llm, PROMPTS[0], liar.address)
            assert decode(llm, PROMPTS[0], transfer) == expected
            assert tier_of(llm).counts.loads == {"failed": 1}
            assert failures(llm)[reason] > 0
            assert llm.engine.client.core.scheduler.blocks.num_used == 0
    finally:
        liar.close()


@pytest.mark.parametrize("why", ["dead", "no secret", "other weights", "not on the list"])
def test_a_peer_that_is_none(llama, make_llama, why, monkeypatch):
    """Without waiting for long, the request computes itself."""
    expected = alone(llama, PROMPTS[0])
    address = f"127.0.0.1:{free_port(count=2)}"
    more = {"listen": address}
    model = llama
    if why == "other weights":
        model = make_llama("kv_transfer_other", head_dim=32, initializer_range=0.3)[0]
    if why == "no secret":
        monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", "another secret, as long as it is")
    first = engine(model, more)
    monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", SECRET)
    transfer = prefill(first, PROMPTS[0])
    if why == "dead":
        first.close()
    if why == "not on the list":
        transfer["remote_host"] = "169.254.169.254"
    with engine(llama, {"peers": [address], "timeout": 60}) as llm:
        time.sleep(1.0)
        began = time.monotonic()
        assert decode(llm, PROMPTS[0], transfer) == expected
        assert time.monotonic() - began < 30
        outcome = "foreign" if why == "not on the list" else "failed"
        assert tier_of(llm).counts.loads == {outcome: 1}
        if outcome == "failed":
            reason = "foreign" if why == "other weights" else "unreachable"
            assert failures(llm) == {reason: len(transfer["remote_block_ids"][0])}
    first.close()


def test_others_go_on_while_a_request_waits(llama):
    """A slow peer holds up its own request alone."""
    liar = Liar({})
    try:
        with engine(llama, {"peers": [str(liar.address)], "timeout": 1.5}) as llm:
            transfer = announced(llm, PROMPTS[0], liar.address)
            order: list[str] = []
            core = llm.engine
            slow = SamplingParams(**LOUD, extra_args={"kv_transfer_params": transfer})
            core.add_request("slow", PROMPTS[0], slow)
            core.add_request("quick", PROMPTS[1], SamplingParams(**LOUD))
            while core.has_unfinished_requests():
                order += [o.request_id for o in core.step() if o.finished]
            assert order == ["quick", "slow"]
    finally:
        liar.close()


def test_a_thousand_transfers_that_nobody_fetches_leave_nothing(llama):
    """Leases end, and the budget is kept meanwhile."""
    own = {"listen": f"127.0.0.1:{free_port(count=2)}", "lease": 1.0, "memory": "256KiB"}
    with engine(llama, own) as llm:
        store = store_of(llm)
        params = SamplingParams(
            **{**LOUD, "max_tokens": 1}, extra_args={"kv_transfer_params": OFFER}
        )
        for start in range(0, 1000, 100):
            some = prompts(*[24] * 100, seed=start)
            for output in llm.generate(some, params, use_tqdm=False):
                assert not output.error
            assert store.counts().held_bytes <= 256 * 1024
        assert store.counts().held_blocks > 0
        idle(llm)
        end = time.monotonic() + 10
        while store.counts().held_blocks and time.monotonic() < end:
            time.sleep(0.05)
        counts = store.counts()
        assert counts.held_blocks == counts.held_bytes == 0
        tier = tier_of(llm)
        assert not tier._wanted and not tier._once
        planner = llm.engine.client.core.scheduler.planners.by_name["kv_transfer"]
        assert not planner._offers and not planner._shown


def test_aborted_requests_leave_nothing(llama):
    """On either engine, at any time."""
    with pair(llama) as (first, second):
        transfer = prefill(first, PROMPTS[0])
        for number in range(50):
            for llm, args in ((first, OFFER), (second, transfer)):
                sampling = SamplingParams(**LOUD, extra_args={"kv_transfer_params": args})
                llm.engine.add_request("x", PROMPTS[0], sampling)
                for _ in range(number % 4):
                    llm.engine.step()
                llm.engine.abort("x")
        for llm in (first, second):
            idle(llm)
            tier = tier_of(llm)
            assert not tier._announced and not tier._wanted and not tier._once
            assert llm.engine.client.core.scheduler.blocks.num_used == 0


def test_two_requests_with_one_prompt_are_fetched_twice(llama):
    """A block is freed once it was read as often as it was offered."""
    with pair(llama) as (first, second):
        for transfer in [prefill(first, PROMPTS[0]) for _ in range(2)]:
            second.reset_prefix_cache()
            decode(second, PROMPTS[0], transfer)
        assert tier_of(second).counts.loads == {"loaded": 2}
        assert store_of(first).counts().held_blocks == 0


def test_a_reset_forgets_what_is_offered(llama):
    with pair(llama) as (first, second):
        transfer = prefill(first, PROMPTS[0])
        assert store_of(first).counts().held_blocks
        first.reset_prefix_cache()
        decode(first, PROMPTS[1], None)
        assert store_of(first).counts().held_blocks == 0
        decode(second, PROMPTS[0], transfer)
        assert tier_of(second).counts.loads == {"failed": 1}


# Options and requests that are refused


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"listen": "nowhere"}, "listen: 'nowhere' is no HOST:PORT"),
        ({"listen": "0.0.0.0:5600"}, "State in advertise"),
        ({"advertise": "10.0.0.1:5600"}, "advertise: it is the name of an address"),
        ({"peers": "a:1,b"}, "peers: 'b' is no HOST:PORT"),
        ({"peers": "a:1", "memory": "0.5"}, "memory: '0.5' is a share"),
        ({"peers": "a:1", "secret_file": "/nonexistent"}, "cannot be read"),
    ],
)
def test_options_that_cannot_be_met_are_refused(llama, own, text):
    with pytest.raises(ToolkitError, match=text):
        engine(llama, own)


def test_an_engine_without_a_secret_does_not_start(llama, monkeypatch):
    for secret in ("", "short"):
        monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", secret)
        with pytest.raises(ToolkitError, match="secret"):
            engine(llama, {"peers": "127.0.0.1:5600"})


def test_a_port_in_use_ends_the_start(llama):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ToolkitError, match="cannot be opened"):
            engine(llama, {"listen": address})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, "are both true"),
        ({"do_remote_decode": 1}, "do_remote_decode must be true or false"),
        ({"do_remote_prefill": True}, "remote_host must be a text"),
        ({"do_remote_prefill": True, "transfer_id": 1}, "transfer_id must be a text"),
        ({"do_remote_prefill": True, "remote_block_ids": [1]}, "remote_block_ids must be"),
        ({"do_remote_prefill": True, "remote_block_ids": [[-1]]}, "remote_block_ids must be"),
        ({"do_remote_decode": True}, "no peer can fetch from this engine"),
    ],
)
def test_requests_that_cannot_be_met_are_refused(llama, given, text):
    with engine(llama, {"peers": ["127.0.0.1:5600"]}) as llm:
        sampling = SamplingParams(**LOUD, extra_args={"kv_transfer_params": given})
        with pytest.raises(RequestError, match=text):
            llm.generate([PROMPTS[0]], sampling, use_tqdm=False)
        assert decode(llm, PROMPTS[0], None)


def test_an_engine_without_the_option_says_so(llama):
    with engine(llama) as llm:
        sampling = SamplingParams(**LOUD, extra_args={"kv_transfer_params": OFFER})
        with pytest.raises(RequestError, match="this engine transfers no caches"):
            llm.generate([PROMPTS[0]], sampling, use_tqdm=False)
        # Params that ask for nothing are obeyed.
        none = SamplingParams(
            **LOUD, extra_args={"kv_transfer_params": {"do_remote_decode": False}}
        )
        assert not llm.generate([PROMPTS[0]], none, use_tqdm=False)[0].error
