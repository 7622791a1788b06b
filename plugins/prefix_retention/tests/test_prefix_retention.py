"""Prefixes that requests ask to keep outlive others, within bounds, and yield to requests that
run."""

from __future__ import annotations

from itertools import pairwise

import httpx
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm_prefix_retention import RetentionParams
from toolkit_lm_prefix_retention.front import KEY
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_serving import CLIENT

pytestmark = pytest.mark.anyio
ENGINE = {
    "model": "tiny",
    "max_model_len": 128,
    "num_kv_blocks": 40,
    "block_size": 16,
    "max_num_seqs": 4,
}
PLAIN = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def asking(retention="24h", key=None):
    asked = {"prompt_cache_retention": retention, "prompt_cache_key": key}
    return SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, extra_args=asked)


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def clock(monkeypatch):
    """The planner's time."""
    now = [1000.0]
    monkeypatch.setattr("toolkit_lm_prefix_retention.planner.time.monotonic", lambda: now[0])
    return now


def engine(**options):
    return LLM(**ENGINE, plugin_option={"prefix_retention": {"enabled": True, **options}})


def prompt(number, length=65):
    return {
        "prompt_token_ids": [(number * 37 + k * 11 + number * k) % 240 + 5 for k in range(length)]
    }


def ask(llm, number, params=PLAIN, length=65, client=""):
    context = {CLIENT: client} if client else {}
    llm.engine.add_request(
        f"{number} {id(params)} {client}", prompt(number, length), params, context=context
    )
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    return outputs[-1].num_cached_tokens


def fill(llm):
    """Other prompts, more than the cache holds."""
    for number in range(100, 112):
        ask(llm, number)


def retained(llm):
    [found] = llm.call_workers("prefix_retention.num_retained", None, dict[str, int])
    return found


def test_a_retained_prefix_outlives_others():
    with engine() as llm:
        ask(llm, 1, asking())
        ask(llm, 2)
        fill(llm)
        assert ask(llm, 2) == 0
        fill(llm)
        assert ask(llm, 1) == 64
        assert retained(llm) == {"": 4}


def test_its_time_ends(clock):
    with engine() as llm:
        ask(llm, 1, asking("in_memory"))
        clock[0] += 599
        fill(llm)
        assert ask(llm, 1) == 64
        clock[0] += 2
        fill(llm)
        assert retained(llm) == {}
        fill(llm)
        assert ask(llm, 1) == 0


def test_each_use_extends_it(clock):
    with engine() as llm:
        for _ in range(3):
            ask(llm, 1, asking("in_memory"))
            clock[0] += 500
        fill(llm)
        assert ask(llm, 1) == 64
        # A shorter time does not end a longer one.
        ask(llm, 1, asking("24h"))
        ask(llm, 1, asking("in_memory"))
        clock[0] += 5000
        fill(llm)
        assert ask(llm, 1) == 64


def test_clients_and_all_together_have_bounds():
    """40 blocks: 20 may be retained, 10 by each client."""
    with engine(share=0.5, client_share=0.5) as llm:
        for number in range(8):
            ask(llm, number, asking(), client="greedy")
            assert retained(llm)["greedy"] <= 10
        ask(llm, 50, asking(), client="modest")
        assert retained(llm) == {"greedy": 10, "modest": 4}
        for number in range(60, 64):
            ask(llm, number, asking(), client=f"client {number}")
            found = retained(llm)
            assert sum(found.values()) <= 20
            assert found[f"client {number}"] == 4
        # Those with the most give way.
        assert max(retained(llm).values()) == 4


def test_what_a_client_used_longest_ago_goes_first():
    with engine(share=0.25, client_share=1.0) as llm:
        for number in range(4):
            ask(llm, number, asking())
        fill(llm)
        assert ask(llm, 0) == 0
        assert ask(llm, 3) == 64


def test_the_beginning_of_a_long_prompt_is_kept():
    with engine(share=0.1, client_share=1.0) as llm:
        ask(llm, 1, asking(), length=120)
        assert retained(llm) == {"": 4}
        fill(llm)
        assert ask(llm, 1, length=120) == 64


def test_running_requests_get_all_blocks():
    """All of the cache is retained, and no request waits longer for that."""
    outputs = []
    for share in (0.0, 1.0):
        with engine(share=share, client_share=1.0) as llm:
            for number in range(10):
                ask(llm, number, asking())
            assert sum(retained(llm).values()) == (40 if share else 0)
            prompts = [prompt(number, 100) for number in range(200, 206)]
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            answers = llm.generate(prompts, params)
            outputs.append([answer.outputs[0].token_ids for answer in answers])
            assert llm.engine.client.core.scheduler.blocks.num_used == 0
    assert outputs[0] == outputs[1] and all(len(tokens) == 20 for tokens in outputs[0])


def test_nothing_is_retained_unless_asked():
    with engine() as llm:
        fill(llm)
        ask(llm, 1, asking(retention=None, key="a"))
        assert retained(llm) == {}


def test_it_is_off_until_an_operator_asks():
    with LLM(**ENGINE) as llm:
        ask(llm, 1, asking(key="a"))
        assert "prefix_retention" not in llm.engine.client.core.scheduler.planners.by_name
        fill(llm)
        assert ask(llm, 1) == 0


def test_a_reset_forgets_contents_and_keeps_time():
    with engine() as llm:
        ask(llm, 1, asking())
        llm.reset_prefix_cache()
        assert ask(llm, 1) == 0
        fill(llm)
        assert ask(llm, 1) == 64


def ranged(*ranges, decode=None, decode_ms=None, max_tokens=2, more=None):
    """Parameters of a request with ranges (start, end, priority, milliseconds)."""
    names = ("token_start", "token_end", "priority", "duration_ms")
    config = {
        "token_range_retention_configs": [dict(zip(names, one, strict=True)) for one in ranges],
        "decode_retention_priority": decode,
        "decode_duration_ms": decode_ms,
    }
    asked = {"kv_cache_retention_config": config} | (more or {})
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=asked)


def test_contents_leave_by_priority():
    """The whole cache is of prompts with priorities, and others come by."""
    with engine(share=1.0, client_share=1.0) as llm:
        for number, priority in enumerate((50, 90, 10, 70, 36, 0)):
            ask(llm, number, ranged((0, None, priority, None)))
        ask(llm, 50)
        found = []
        for number in range(100, 109):
            ask(llm, number)
            pools = llm.engine.client.core.scheduler.blocks.pools
            found.append(
                {
                    marked
                    for marked, marks in by_prompt(llm).items()
                    if all(pools[pool].find(key) is not None for pool, key in marks)
                }
            )
    # 28 of 40 blocks are taken, and each of the others takes 4, and one that it gives back.
    assert found[0] == {0, 1, 2, 3, 4, 5}
    order = [gone for before, after in pairwise(found) for gone in before - after]
    assert order == [5, 2], found


def by_prompt(llm):
    """Marks by the number of the prompt, as `ask` numbers them."""
    planner = llm.engine.client.core.scheduler.planners.by_name["prefix_retention"]
    marks = [*planner._owners]
    return {number: marks[4 * number : 4 * number + 4] for number in range(len(marks) // 4)}


def priorities(llm):
    planner = llm.engine.client.core.scheduler.planners.by_name["prefix_retention"]
    return sorted(planner._orders[0].priorities.values())


def test_ranges_have_priorities_of_their_own():
    with engine(share=1.0, client_share=1.0) as llm:
        ask(llm, 1, ranged((0, 32, 80, None), (48, None, 20, None)))
        assert priorities(llm) == [20, 80, 80]
        fill(llm)
        # The first two blocks have stayed. The one between was like others.
        assert ask(llm, 1) == 32


def test_generated_tokens_have_a_priority():
    with engine(share=1.0, client_share=1.0) as llm:
        ask(llm, 1, ranged(decode=60, decode_ms=10**6, max_tokens=40), length=30)
        # Tokens 30 to 68, and the block with tokens of both is the prompt's.
        assert priorities(llm) == [60, 60]
        ask(llm, 2, ranged((0, None, 40, None), max_tokens=20), length=33)
        assert priorities(llm) == [40, 40, 60, 60]


def test_ranges_end_and_are_bounded(clock):
    with engine(share=0.1, client_share=1.0) as llm:
        ask(llm, 1, ranged((0, 16, 90, 5000), (16, None, 80, 10**12), decode=70, max_tokens=40))
        assert sum(retained(llm).values()) == len(priorities(llm)) == 4
        clock[0] += 6
        ask(llm, 2)
        ask(llm, 3, ranged((0, 16, 50, 10**15 / 2)))
        assert all(priority in (50, 70, 80) for priority in priorities(llm))
        clock[0] += 86401
        ask(llm, 4)
        assert retained(llm) == {} and priorities(llm) == []


@pytest.mark.parametrize(
    "config, words",
    [
        ({"token_ranges": []}, "has no 'token_ranges'"),
        ({"token_range_retention_configs": {}}, None),
        ({"token_range_retention_configs": {"a": 1}}, "must be a list"),
        ({"token_range_retention_configs": [{}] * 65}, "64 ranges at most"),
        ({"token_range_retention_configs": [3]}, "must be a mapping"),
        ({"token_range_retention_configs": [{"start": 3}]}, "has no 'start'"),
        ({"token_range_retention_configs": [{"token_start": -1}]}, "token_start must be"),
        (
            {"token_range_retention_configs": [{"token_start": 4, "token_end": 4}]},
            "token_end must be an integer from 5",
        ),
        ({"token_range_retention_configs": [{"priority": 101}]}, "priority must be"),
        ({"token_range_retention_configs": [{"priority": True}]}, "priority must be"),
        ({"token_range_retention_configs": [{"duration_ms": 0}]}, "duration_ms must be"),
        ({"token_range_retention_configs": [{}, {"token_start": 4}]}, "two ranges have"),
        ({"decode_retention_priority": -1}, "decode_retention_priority must be"),
        ({"decode_duration_ms": "5m"}, "decode_duration_ms must be"),
        ([], "a mapping"),
    ],
)
def test_wrong_ranges_are_named(config, words):
    asked = {"kv_cache_retention_config": config}
    if words is None:
        RetentionParams(**asked)
        return
    with pytest.raises(RequestError, match=words) as told:
        RetentionParams(**asked)
    assert told.value.param == "kv_cache_retention_config"


def test_a_time_and_ranges_exclude_each_other():
    params = ranged((0, None, 50, None), more={"prompt_cache_retention": "24h"})
    with engine() as llm, pytest.raises(RequestError, match="give one of them"):
        ask(llm, 1, params)


@pytest.mark.parametrize("wrong", [{"retention": "48h"}, {"retention": 5}, {"key": "k" * 257}])
def test_wrong_values_are_named(wrong):
    with engine() as llm, pytest.raises(RequestError, match="prompt_cache_"):
        ask(llm, 1, asking(**{"retention": "24h", **wrong}))


async def test_fields_of_requests():
    on = {"prefix_retention": {"enabled": True}}
    config = VllmConfig.make(**ENGINE, engine_process=False, plugin_option=on)
    async with AsyncLLM(config) as llm:
        await llm.wait_ready()
        app = create_app(llm, ServerOptions())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            body = {"max_tokens": 1, "prompt_cache_retention": "24h", "prompt_cache_key": "a"}
            ids = prompt(1)["prompt_token_ids"]
            text = "hello world " * 20
            for path, more in (
                ("/v1/completions", {"prompt": ids}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ):
                answer = await client.post(path, json={**body, **more})
                assert answer.status_code == 200, answer.text
                assert "x-ignored-fields" not in answer.headers
            wrong = {"prompt": ids, "prompt_cache_retention": "1y"}
            answer = await client.post("/v1/completions", json=wrong)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "prompt_cache_retention"
        [found] = await llm.call_workers("prefix_retention.num_retained", None, dict[str, int])
        assert sum(found.values()) > 4
        assert KEY == "prompt_cache_key"
