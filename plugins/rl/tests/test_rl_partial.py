"""Partial rollouts: a request that new weights interrupt keeps its tokens, and goes on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from toolkit_lm import AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm_rl.control import AsyncControl
from transformers import AutoModelForCausalLM

PROMPT = [(3 * k) % 90 + 5 for k in range(9)]
MOST = 40
TOLERANCE = 1e-4
"""Log probabilities, in float32."""


@pytest.fixture
def engine(policies):
    made = AsyncLLM(
        VllmConfig.make(
            model=str(policies / "old"),
            max_model_len=64,
            num_kv_blocks=48,
            block_size=16,
            dtype="float32",
            renderer="tokens",
            engine_process=False,
            plugin_option={"rl": {"hidden_states": "last"}},
        )
    )
    yield made
    made.close()


def params(**more):
    given = {"temperature": 0, "max_tokens": MOST, "ignore_eos": True, "logprobs": 0, **more}
    return SamplingParams(**given)


async def drawn(engine, tokens, sampling, after=None, then=None):
    """The last output of a request. `then` is called once it has more than `after` tokens."""
    task = None
    async for output in engine.generate({"prompt_token_ids": tokens}, sampling):
        if task is None and then is not None and len(output.outputs[0].token_ids) > after:
            task = asyncio.ensure_future(then())
    if task is not None:
        await task
    return output


def logprobs_of(path, tokens):
    """Log probability of each token after the first, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def check_logprobs(answer, path, begin, end, before=()):
    """Tokens [begin, end) of an answer have the log probabilities of a policy. `before`: tokens of
    the prompt."""
    tokens = [*before, *answer.token_ids]
    wanted = logprobs_of(path, tokens)[len(before) - 1 :][begin:end]
    found = [answer.logprobs[i][answer.token_ids[i]].logprob for i in range(begin, end)]
    assert np.abs(np.array(found) - wanted).max() < TOLERANCE


@pytest.mark.anyio
async def test_requests_that_are_kept_go_on_with_new_weights(engine, policies):
    control = AsyncControl(engine)

    async def update():
        await control.pause("keep")
        await control.update_weights(str(policies / "new"), "second")
        await control.resume()

    answer = (await drawn(engine, PROMPT, params(), 4, update)).outputs[0]
    assert len(answer.token_ids) == MOST
    old, new = answer.weight_versions
    assert (old.version, old.start, new.version, new.end) == ("", 0, "second", MOST)
    assert 4 < old.end == new.start < MOST
    check_logprobs(answer, policies / "old", 0, old.end, PROMPT)
    check_logprobs(answer, policies / "new", new.start, MOST, PROMPT)


@pytest.mark.anyio
async def test_a_pause_that_aborts_gives_the_tokens_so_far_and_they_can_be_continued(
    engine, policies
):
    """The continuation is what an engine of the new weights draws after these tokens. Their log
    probabilities by the new weights are those of a prompt."""
    control = AsyncControl(engine)
    sampling = params().replace(extra_args={"return_hidden_states": True})
    partial = await drawn(engine, PROMPT, sampling, 4, control.pause)
    answer = partial.outputs[0]
    count = len(answer.token_ids)
    assert (answer.finish_reason, 4 < count < MOST) == ("abort", True)
    assert [(s.version, s.start, s.end) for s in answer.weight_versions] == [("", 0, count)]
    assert len(answer.hidden_states) == len(PROMPT) + count - 1
    check_logprobs(answer, policies / "old", 0, count, PROMPT)
    await control.update_weights(str(policies / "new"), "second")
    await control.resume()
    known = PROMPT + answer.token_ids
    rest = params(max_tokens=MOST - count, prompt_logprobs=0)
    output = await drawn(engine, known, rest)
    continued = output.outputs[0]
    assert [s.version for s in continued.weight_versions] == ["second"]
    check_logprobs(continued, policies / "new", 0, MOST - count, known)
    wanted = logprobs_of(policies / "new", known)
    found = [
        table[token].logprob
        for token, table in zip(known[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert np.abs(np.array(found) - wanted).max() < TOLERANCE


@pytest.mark.anyio
async def test_a_client_that_aborts_keeps_what_it_had(engine):
    """The request ends without another token, and the engine works on."""
    outputs = engine.generate({"prompt_token_ids": PROMPT}, params(), "mine")
    async for output in outputs:
        if len(output.outputs[0].token_ids) > 4:
            await engine.abort("mine")
    answer = output.outputs[0]
    assert answer.finish_reason == "abort"
    assert 4 < len(answer.token_ids) == len(answer.logprobs) < MOST
    again = (await drawn(engine, PROMPT, params())).outputs[0]
    assert again.token_ids[: len(answer.token_ids)] == answer.token_ids
