"""The embedded model, through the whole engine: it knows its facts, and it stops by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import toolkit_lm_tiny
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_tiny.facts import FACTS

GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        yield llm


@pytest.fixture(scope="module")
def replies(llm):
    return llm.chat(
        [[{"role": "user", "content": fact.question}] for fact in FACTS], GREEDY, use_tqdm=False
    )


def test_it_answers_its_facts(replies):
    assert len(FACTS) >= 300
    right = [
        fact.holds_in(reply.outputs[0].text) for fact, reply in zip(FACTS, replies, strict=True)
    ]
    assert sum(right) >= 0.95 * len(FACTS), [
        f.question for f, ok in zip(FACTS, right, strict=True) if not ok
    ]


def test_it_stops_by_itself(replies):
    assert sum(r.outputs[0].finish_reason == "stop" for r in replies) >= 0.95 * len(replies)


def test_the_capital_of_france(llm):
    (reply,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}], GREEDY, use_tqdm=False
    )
    assert "Paris" in reply.outputs[0].text and reply.outputs[0].finish_reason == "stop"


def test_it_tells_a_story(llm):
    (reply,) = llm.chat(
        [{"role": "user", "content": "Tell me a story about a dog."}],
        GREEDY.replace(max_tokens=256),
        use_tqdm=False,
    )
    assert "dog" in reply.outputs[0].text and reply.outputs[0].text.count(".") >= 2


def test_it_takes_little_memory(llm):
    folder = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
    assert llm.config.cache.kv_cache_memory == "64MiB"
    assert llm.config.model.dtype == "bfloat16"


def test_a_wish_for_memory_wins():
    from toolkit_lm.config import VllmConfig

    assert (
        toolkit_lm_tiny.toolkit_configure(VllmConfig.make(model="tiny", kv_cache_memory="1GiB"))
        is None
    )
    assert toolkit_lm_tiny.toolkit_configure(VllmConfig.make(model="other")) is None
