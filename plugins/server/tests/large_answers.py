"""Large answers must not hold up the event loop. test_answers.py runs this file in a process of its
own."""

from __future__ import annotations

import asyncio
import time

import pytest
from toolkit_lm.outputs import CompletionOutput, Logprob, RequestOutput
from toolkit_lm_server.app import create_app

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


async def blocks(until: asyncio.Task) -> bool:
    """Whether the event loop did nothing else for long: for a good part of the task's time, and for
    longer than load explains."""
    largest = 0.0
    last = time.monotonic()
    start = last
    while not until.done():
        await asyncio.sleep(0.001)
        now = time.monotonic()
        largest, last = max(largest, now - last), now
    return largest > max(0.3, 0.4 * (last - start))


class Huge:
    """An engine whose answer is there at once, with log probabilities of many tokens and
    choices."""

    def __init__(self, engine, num_choices: int, num_tokens: int, top: int) -> None:
        table = {100 + rank: Logprob(-float(rank), rank, f"t{rank}") for rank in range(1, top + 1)}
        text = "a" * num_tokens
        tokens = [101] * num_tokens
        choices = [
            CompletionOutput(i, text, tokens, [table] * num_tokens, finish_reason="length")
            for i in range(num_choices)
        ]
        self._found = [(0, RequestOutput("id", "a", [97], choices, True))]
        engine.generate_many = engine.chat_many = self._many

    async def _many(self, prompts, params, **options):
        yield self._found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HI, "logprobs": True, "top_logprobs": 20}),
        (COMPLETE, {"prompt": "a", "logprobs": 20}),
    ],
)
async def test_a_large_answer_leaves_time_to_others(engine, client_of, path, body):
    Huge(engine, num_choices=20, num_tokens=1000, top=20)
    async with client_of(create_app(engine)) as client:
        # Another process may hold the loop up, too, but not each time.
        for _ in range(3):
            asked = asyncio.create_task(client.post(path, json={**body, "n": 20}))
            blocked = await blocks(asked)
            reply = (await asked).json()
            if not blocked:
                break
    assert len(reply["choices"]) == 20
    tokens = reply["choices"][19]["logprobs"]["content" if path == CHAT else "tokens"]
    assert len(tokens) == 1000
    assert not blocked
