"""A router that follows the events knows which blocks an engine has, whatever happens to them."""

from __future__ import annotations

import random
import socket
import time

import httpx
import pytest
import torch
from follower import Follower
from ports import free_port
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_kv_events import Options
from toolkit_lm_kv_events.endpoints import parse
from toolkit_lm_kv_events.planner import RANK
from toolkit_lm_kv_events.publisher import Publisher
from toolkit_lm_kv_events.wire import AllBlocksCleared, BlockRemoved, Source, short
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from transformers import Qwen2Config, Qwen2ForCausalLM

ENGINE = {
    "model": "tiny",
    "max_model_len": 128,
    "num_kv_blocks": 24,
    "block_size": 8,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
}
pytestmark = pytest.mark.anyio
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def options():
    return {
        "enabled": True,
        "endpoint": f"tcp://127.0.0.1:{free_port(count=2)}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port(count=2)}",
        "topic": "kv@here@tiny",
    }


def engine(options, **more):
    return LLM(**ENGINE, plugin_option={"kv_events": options}, **more)


def following(options):
    return Follower(options["endpoint"], options["replay_endpoint"], topic=b"kv@")


def own_blocks(llm):
    """The blocks that the engine itself finds."""
    core = llm.engine.client.core
    return {
        (group, short(digest))
        for pool in core.scheduler.blocks.pools
        for group, digest in pool._blocks
    }


def check(llm, follower, seconds=5.0):
    """Waits until what the follower believes is what the engine has."""
    end = time.monotonic() + seconds
    while (own := own_blocks(llm)) != follower.blocks.keys():
        assert follower.read() == []
        assert time.monotonic() < end, (own ^ follower.blocks.keys(), len(own))


def prompts(numbers, count):
    """Prompts that share beginnings."""
    stems = [[numbers.randrange(5, 250) for _ in range(40)] for _ in range(3)]
    return [
        {
            "prompt_token_ids": numbers.choice(stems)[: numbers.randrange(9, 40)]
            + [numbers.randrange(5, 250) for _ in range(numbers.randrange(1, 20))]
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_follower_has_the_engines_own_set(options, seed):
    """Requests finish, are preempted, aborted, and evict each other; the cache is reset."""
    numbers = random.Random(seed)
    with engine(options) as llm, following(options) as follower:
        follower.replay()
        core = llm.engine.client.core
        for turn in range(6):
            ids = []
            for prompt in prompts(numbers, numbers.randrange(1, 8)):
                ids.append(f"{turn} {len(ids)}")
                n = numbers.choice((1, 1, 3))
                params = SamplingParams(max_tokens=numbers.randrange(1, 30), n=n, ignore_eos=True)
                llm.engine.add_request(ids[-1], prompt, params)
            for step in range(200):
                if not llm.engine.has_unfinished_requests():
                    break
                llm.engine.step()
                if step == 5:
                    llm.engine.abort(numbers.choice(ids))
                if step == 9 and turn % 3 == 2:
                    core.start_over()
            if turn == 3:
                llm.reset_prefix_cache()
            check(llm, follower)
        kinds = [event["type"] for event in follower.events]
        assert {*kinds} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        assert kinds.count("AllBlocksCleared") >= 3
        assert follower.topics == {b"kv@here@tiny"} and follower.ranks == {0}


def test_each_group_of_layers_is_told(options, tmp_path):
    """Layers with a window have their own blocks, which leave earlier."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    }
    Qwen2ForCausalLM(Qwen2Config(**shape, dtype="float32")).save_pretrained(tmp_path)
    more = {"model": str(tmp_path), "renderer": "tokens", "dtype": "float32"}
    given = {**ENGINE, **more, "num_kv_blocks": 40, "plugin_option": {"kv_events": options}}
    with LLM(**given) as llm, following(options) as follower:
        follower.replay()
        for prompt in prompts(random.Random(3), 8):
            llm.generate([prompt], GREEDY)
            check(llm, follower)
        stored = [event for event in follower.events if event["type"] == "BlockStored"]
        kinds = {
            (event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window"))
            for event in stored
        }
        assert kinds == {("full_attention", None), ("sliding_window", 16)}
        assert {event["group_idx"] for event in stored} == {0, 1}


def test_the_events_say_which_tokens_are_cached(options):
    """A router that hashes tokens itself finds the prefix."""
    prompt = list(range(10, 37))
    with engine(options) as llm, following(options) as follower:
        follower.replay()
        [output] = llm.generate([{"prompt_token_ids": prompt}], GREEDY)
        check(llm, follower)
        found = {follower.tokens(block) for block in follower.blocks}
        tokens = (*prompt, *output.outputs[0].token_ids)
        # The last token is sampled, and never computed.
        assert found == {tokens[:end] for end in range(8, len(tokens), 8)}
        event = next(iter(follower.blocks.values()))[2]
        assert event["block_size"] == 8 and event["group_idx"] == 0
        assert event["kv_cache_spec_kind"] == "full_attention"
        assert event["lora_id"] is None and event["lora_name"] is None
        assert "extra_keys" not in event


def test_salted_blocks_say_so(options):
    prompt = list(range(10, 37))
    with engine(options) as llm, following(options) as follower:
        follower.replay()
        llm.generate([{"prompt_token_ids": prompt}], GREEDY, cache_salt="blue")
        check(llm, follower)
        stored = [event for event in follower.events if event["type"] == "BlockStored"]
        assert stored[0]["extra_keys"][0] == ["blue"]
        assert stored[0]["extra_keys"][1] is None


def test_a_replay_fills_a_gap(options):
    with engine(options) as llm, following(options) as late:
        for prompt in prompts(random.Random(7), 6):
            llm.generate([prompt], GREEDY)
        late.read()
        # The messages before it came are lost.
        late.next = 0
        late.blocks.clear()
        numbers = late.replay()
        assert numbers == [*range(numbers[-1] + 1)] and len(numbers) > 3
        check(llm, late)
        with following(options) as later:
            assert later.replay(numbers[-2]) == numbers[-2:]


def test_replays_are_bounded(options):
    bounds = {"buffer_steps": 3}
    with engine(options | bounds) as llm, following(options) as follower:
        for prompt in prompts(random.Random(7), 6):
            llm.generate([prompt], GREEDY)
        time.sleep(0.2)
        numbers = follower.replay()
        assert len(numbers) == 3 and numbers[0] > 0


def make(endpoint, replay_endpoint=None, **more):
    bounds = {"buffer_steps": 100, "buffer_bytes": 2**20, "hwm": 100, "max_queue_size": 100}
    return Publisher(endpoint, replay_endpoint, **{**bounds, **more})


def test_a_subscriber_that_does_not_read_holds_nobody_up(options):
    publisher = make(options["endpoint"], hwm=4, max_queue_size=10**6)
    with Follower(options["endpoint"]) as slow:
        slow._sub.set_hwm(1)
        time.sleep(0.2)
        start = time.monotonic()
        for number in range(20_000):
            publisher.put(BlockRemoved([number] * 50, "GPU", 0))
        taken = time.monotonic() - start
        publisher.close()
        assert publisher.num_published > 10 and taken < 2.0
        assert not publisher.num_overflows


def test_what_is_lost_before_it_is_published_empties_the_cache(options):
    """No sequence number shows it: so subscribers must not go on believing."""
    publisher = make(options["endpoint"], max_queue_size=50)
    told = []
    publisher._queue.put(None)
    publisher._threads[0].join()
    for number in range(60):
        publisher.put(BlockRemoved([number], "GPU", 0))
    while not publisher._queue.empty():
        told.append(publisher._queue.get())
    publisher._queue.put(None)
    publisher.close()
    assert publisher.num_overflows == 1
    assert told[0] == AllBlocksCleared() and told[-1].block_hashes == [59]


def test_the_bytes_of_replays_are_bounded(options):
    publisher = make(options["endpoint"], options["replay_endpoint"], buffer_bytes=1000)
    with Follower(options["endpoint"], options["replay_endpoint"]) as follower:
        for number in range(30):
            publisher.put(BlockRemoved([2**63 + number] * 20, "GPU", 0))
            time.sleep(0.005)
        time.sleep(0.1)
        assert sum(len(payload) for _, payload in publisher._buffer) <= 1000
        follower._apply = lambda event: None
        assert 1 <= len(follower.replay()) < 10
    publisher.close()


@pytest.mark.parametrize(
    "frames",
    [[b"x"], [b"", b"1234567"], [b"", b"", b"12345678"], [b"", b"123456789"], [b"", b"x" * 10**6]],
    ids=["no number", "short", "many", "long", "huge"],
)
def test_malformed_requests_for_replays_get_no_answer(options, frames):
    publisher = make(options["endpoint"], options["replay_endpoint"])
    with (
        Follower(options["endpoint"], options["replay_endpoint"]) as bad,
        Follower(options["endpoint"], options["replay_endpoint"]) as good,
    ):
        bad._dealer.send_multipart(frames)
        assert not bad._dealer.poll(300)
        assert good.replay() == [0]
    publisher.close()


def test_a_client_that_asks_and_goes_leaves_replays_to_others(options):
    publisher = make(options["endpoint"], options["replay_endpoint"], buffer_steps=5000)
    for number in range(300):
        publisher.put(BlockRemoved([number], "GPU", 0))
        if number % 3 == 0:
            time.sleep(0.003)
    for _ in range(3):
        with Follower(options["endpoint"], options["replay_endpoint"]) as gone:
            gone._dealer.send_multipart((b"", (0).to_bytes(8, "big")))
            time.sleep(0.05)
    with Follower(options["endpoint"], options["replay_endpoint"]) as good:
        good._apply = lambda event: None
        assert len(good.replay(timeout=10.0)) > 10
    publisher.close()


def test_a_port_in_use_ends_the_start(options):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name in ("endpoint", "replay_endpoint"):
            with pytest.raises(ConfigError, match=rf"kv_events.{name}: .*{port}.*in use"):
                engine(options | {name: f"tcp://127.0.0.1:{port}"})


def test_an_ended_engine_leaves_its_port(options):
    for _ in range(2):
        with engine(options) as llm:
            [source] = llm.call_workers("kv_events.source", None, Source)
            assert source.endpoint == options["endpoint"]


@pytest.mark.parametrize("process", [False, True])
def test_the_source_says_where_to_subscribe(options, process, monkeypatch):
    monkeypatch.setenv(RANK, "0")
    with engine(options, engine_process=process) as llm:
        [source] = llm.call_workers("kv_events.source", None, Source)
        assert source.endpoint == options["endpoint"]
        assert source.replay_endpoint == options["replay_endpoint"]
        assert source.block_size == 8 and source.groups[0].kind == "full_attention"
        with following(options) as follower:
            follower.replay()
            llm.generate([{"prompt_token_ids": list(range(5, 30))}], GREEDY)
            follower.read(0.5)
            assert follower.blocks


@pytest.mark.parametrize("admin, enabled, status", [(1, 1, 200), (1, 0, 200), (0, 1, 404)])
async def test_the_route_is_for_operators(options, admin, enabled, status):
    own = {"kv_events": options | {"enabled": bool(enabled)}}
    config = VllmConfig.make(**ENGINE, plugin_option=own, engine_process=False)
    async with AsyncLLM(config) as llm:
        await llm.wait_ready()
        app = create_app(llm, ServerOptions(admin_routes=bool(admin)))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.get("/kv_event_sources")
    assert answer.status_code == status, answer.text
    if status == 200 and not enabled:
        assert answer.json() == {"sources": []}
    elif status == 200:
        [source] = answer.json()["sources"]
        assert source["endpoint"] == options["endpoint"] and source["data_parallel_rank"] == 0
        group = {"group_idx": 0, "kind": "full_attention", "block_size": 8, "sliding_window": None}
        assert source["groups"] == [group] and source["model"]


def test_it_is_off_until_asked():
    with LLM(**ENGINE) as llm:
        core = llm.engine.client.core
        assert "kv_events" not in core.scheduler.planners.by_name
        assert not core.scheduler.planners.watching
        assert core.scheduler.blocks.on_published is None
        assert all(pool.on_forgotten is None for pool in core.scheduler.blocks.pools)


def test_several_engines_have_a_port_each(options):
    """Port n + rank, as in vLLM."""
    with engine(options, data_parallel_size=2) as llm:
        sources = llm.call_workers("kv_events.source", None, Source)
        assert [source.data_parallel_rank for source in sources] == [0, 1]
        first = parse(options["endpoint"])
        assert [source.endpoint for source in sources] == [first.of_rank(0), first.of_rank(1)]
        followers = [Follower(source.endpoint, source.replay_endpoint) for source in sources]
        for follower in followers:
            follower.replay()
        llm.generate(prompts(random.Random(1), 12), GREEDY)
        for rank, follower in enumerate(followers):
            follower.read(0.5)
            assert follower.ranks == {rank} and follower.blocks
            follower._stack.close()


def test_a_free_port(options):
    """Two engines of a machine with the same options, each of which a subscriber finds."""
    options |= {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    with engine(options) as llm, engine(options) as other:
        sources = [one.call_workers("kv_events.source", None, Source)[0] for one in (llm, other)]
        endpoints = [x for source in sources for x in (source.endpoint, source.replay_endpoint)]
        assert len(set(endpoints)) == 4 and not any(x.endswith(":0") for x in endpoints)
        for one, source in zip((llm, other), sources, strict=True):
            with Follower(source.endpoint, source.replay_endpoint, b"kv@") as follower:
                one.generate(prompts(random.Random(1), 2), GREEDY)
                follower.replay()
                assert follower.blocks


@pytest.mark.parametrize(
    "text, rank, wanted",
    [
        ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5560"),
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://[::1]:70", 1, "tcp://[::1]:71"),
        ("tcp://*:0", 2, "tcp://*:0"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
        ("ipc:///run/kv", 2, "ipc:///run/kv_dp2"),
    ],
)
def test_ports_of_ranks(text, rank, wanted):
    assert parse(text).of_rank(rank) == wanted


@pytest.mark.parametrize(
    "text, binds",
    [
        ("tcp://*:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://localhost:5557", True),
        ("tcp://127.0.0.2:5557", True),
        ("tcp://router.example.com:5557", False),
        ("tcp://10.0.0.3:5557", False),
    ],
)
def test_own_addresses_are_bound(text, binds):
    assert parse(text).binds == binds


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "5557"},
        {"endpoint": "tcp://*"},
        {"endpoint": "tcp://router.example.com:0"},
        {"endpoint": "tcp://*:70000"},
        {"endpoint": "udp://*:5557"},
        {"endpoint": "tcp://a b:1"},
        {"endpoint": "ipc://"},
        {"replay_endpoint": "tcp://router.example.com:5558"},
        {"replay_endpoint": "tcp://127.0.0.1:5557"},
    ],
    ids=str,
)
def test_wrong_addresses_are_named(wrong):
    with pytest.raises(ConfigError, match="kv_events"):
        Options(**wrong)


def test_a_rank_without_a_port_is_named(monkeypatch):
    monkeypatch.setenv(RANK, "3")
    with pytest.raises(ConfigError, match="leaves no port for data parallel rank 3"):
        make("tcp://127.0.0.1:65534", rank=3)
