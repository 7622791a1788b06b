"""Prefixes that requests ask to keep outlive others, within bounds, and yield to requests that
run."""

from __future__ import annotations

import httpx
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
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
        assert not any(pool.retained for pool in llm.engine.client.core.scheduler.blocks.pools)


def test_it_is_off_until_an_operator_asks():
    with LLM(**ENGINE) as llm:
        ask(llm, 1, asking(key="a"))
        assert not any(pool.retained for pool in llm.engine.client.core.scheduler.blocks.pools)
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
