"""Prefill on one engine and decode on another: the answers are those of one engine, and whatever
fails on the way is computed."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import zmq
from ports import free_port
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.share import ARRAY
from toolkit_lm_kv_transfer.wire import Ask, Block, Get, Has, decode_question, encode, make_socket

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
SMALL: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "num_kv_blocks": 200,
}
LOUD: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 5}
SEEDED: dict[str, Any] = {**LOUD, "temperature": 1.0, "seed": 11}
OFFER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
SECRET = "a secret of sixteen characters or more"


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", SECRET)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def llama(make_llama):
    return make_llama("kv_disk", head_dim=32)[0]


@pytest.fixture
def hybrid(tmp_path):
    """A Qwen 3.5 with a recurrent state: the prefix ends at snapshots."""
    sys.path.insert(0, str(ROOT / "contrib_models" / "hybrid" / "tests"))
    families = importlib.import_module("hybrid_families")
    fields = {
        **families.VARIANTS["Qwen3_5ForCausalLM"]["dense"],
        "max_position_embeddings": 4096,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    model = families.make_model("Qwen3_5ForCausalLM", fields).eval()
    randomize(model)
    return make_checkpoint(tmp_path / "hybrid", model)


def prompts(*lengths: int, seed: int = 5) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"prompt_token_ids": torch.randint(3, 272, (n,), generator=generator).tolist()}
        for n in lengths
    ]


PROMPTS = prompts(70, 66, 60, 71)


def engine(model: Path, own: dict[str, Any] | None = None, **more: Any) -> LLM:
    option = {} if own is None else {"kv_transfer": own}
    return LLM(str(model), plugin_option=option, **SMALL | more)


def tier_of(llm: LLM) -> Any:
    return llm.engine.client.core.scheduler.tiers.tiers["kv_transfer"]


def store_of(llm: LLM) -> Any:
    from toolkit_lm_kv_transfer.store import _STORES

    [found] = [s for s in _STORES if s.options is llm_options(llm)]
    return found


def llm_options(llm: LLM) -> Any:
    return llm.engine.client.core.scheduler.planners.by_name["kv_transfer"]._options


def idle(llm: LLM) -> None:
    """Runs the steps that the parts of an engine await."""
    core = llm.engine.client.core
    for _ in range(20):
        if not core.has_unfinished:
            return
        core.step()
    raise AssertionError("the engine never rests")


def prefill(llm: LLM, prompt: Any, **params: Any) -> dict[str, Any]:
    """`kv_transfer_params` that the prefill of a prompt answers."""
    sampling = SamplingParams(
        **{**LOUD, **params, "max_tokens": 1}, extra_args={"kv_transfer_params": OFFER}
    )
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    assert not output.error, output.error
    idle(llm)
    return json.loads(output.outputs[0].arrays[ARRAY].tobytes())


def decode(llm: LLM, prompt: Any, transfer: Any, **params: Any) -> tuple[Any, int]:
    """Tokens and log probabilities of each sequence, and the number of cached tokens."""
    args = None if transfer is None else {"kv_transfer_params": transfer}
    sampling = SamplingParams(**{**LOUD, **params}, extra_args=args)
    [output] = llm.generate([prompt], sampling, use_tqdm=False)
    assert not output.error, output.error
    found = [
        [
            (token, sorted((key, value.logprob) for key, value in entry.items()))
            for token, entry in zip(one.token_ids, one.logprobs, strict=True)
        ]
        for one in output.outputs
    ]
    return found, output.num_cached_tokens


@contextmanager
def pair(model: Path, host: str = "127.0.0.1", own: Any = None, **more: Any) -> Iterator[Any]:
    """A prefill engine, and a decode engine that knows it."""
    address = f"{host}:{free_port(host, count=2)}"
    with (
        engine(model, {"listen": address, **(own or {})}, **more) as first,
        engine(model, {"peers": [address], **(own or {})}, **more) as second,
    ):
        yield first, second


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


def alone(model: Path, prompt: Any) -> Any:
    """The answer of one engine that has nothing cached: what a failed transfer must come to."""
    with engine(model) as llm:
        return decode(llm, prompt, None)


def failures(llm: LLM) -> dict[str, int]:
    return store_of(llm).counts().failures


class Liar:
    """A peer that holds the secret, and answers what the test says."""

    def __init__(self, blocks: dict[tuple[int, bytes], bytes], secret: str = SECRET) -> None:
        """`blocks`: those that it says it has; it is to `answer`."""
        import hashlib

        self.address = Address("127.0.0.1", free_port())
        self.blocks = blocks
        self.answer: Any = None
        self._context = zmq.Context()
        key = hashlib.sha256(secret.encode()).digest()
        self._socket = make_socket(self._context, zmq.ROUTER, key, 2**20, serves=True)
        self._socket.bind(self.address.endpoint)
        self._ends = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends:
            if not self._socket.poll(20):
                continue
            client, body = self._socket.recv_multipart()
            question = decode_question(body)
            if isinstance(question, Ask):
                held = [True] * len(question.keys)
                self._socket.send_multipart([client, encode(Has(question.number, True, held))])
            elif self.answer is not None:
                for frames in self.answer(question):
                    self._socket.send_multipart([client, *frames])
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._ends = True
        self._thread.join()


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


LIES = {
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
