"""`tiny-tools` calls the right function with the right arguments, and says what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import toolkit_lm_tiny
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_tiny.facts import FACTS
from toolkit_lm_tiny.tool_tasks import situation

GREEDY = SamplingParams(temperature=0, max_tokens=96)


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-tools") as llm:
        yield llm


def say(llm, conversations, tools):
    texts = []
    for messages, listed in zip(conversations, tools, strict=True):
        [output] = llm.chat(messages, GREEDY, tools=listed, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        texts.append(output.outputs[0].text)
    return texts


def test_it_does_its_tasks_turn_by_turn(llm):
    rng = Random(12345)
    situations = [situation(rng) for _ in range(30)]
    assert max(len(one.task.calls) for one in situations) == 2, "three turns"
    right = 0
    for one in situations:
        messages = [{"role": "user", "content": one.task.question}]
        said = []
        expected = [*(call.text for call in one.task.calls), one.task.answer]
        for call in one.task.calls:
            said += say(llm, [messages], [one.tools])
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            messages.append(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "a", "type": "function", "function": function}],
                }
            )
            messages.append({"role": "tool", "tool_call_id": "a", "content": call.result})
        said += say(llm, [messages], [one.tools])
        right += said == expected
    assert right >= 0.8 * len(situations)


def test_it_still_knows_facts_without_tools(llm):
    facts = Random(1).sample(FACTS, 60)
    replies = llm.chat(
        [[{"role": "user", "content": fact.question}] for fact in facts], GREEDY, use_tqdm=False
    )
    assert sum(
        fact.holds_in(reply.outputs[0].text) for fact, reply in zip(facts, replies, strict=True)
    ) >= 0.8 * len(facts)


def test_it_is_small():
    folder = Path(toolkit_lm_tiny.__file__).parent / "checkpoint_tools"
    assert (folder / "model.safetensors").stat().st_size <= 4 * 2**20
