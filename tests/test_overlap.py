"""With overlap, the next step is planned before the results of the one before are in. What comes of
it is the same."""

from __future__ import annotations

import time

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import StepEvent

OPTIONS = {
    "num_kv_blocks": 200,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
}
SEEDED = SamplingParams(temperature=0.9, seed=11, max_tokens=18, ignore_eos=True)
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=18, ignore_eos=True),
    "one token": SamplingParams(temperature=0, max_tokens=1),
    "two tokens": SamplingParams(temperature=0, max_tokens=2, ignore_eos=True),
    "to the end of the context": SamplingParams(temperature=0, ignore_eos=True),
    "seeded": SEEDED,
    "eos": SamplingParams(temperature=1.5, seed=3, max_tokens=60),
    "stop tokens": SEEDED.replace(max_tokens=60, stop_token_ids=list(range(3, 40)), min_tokens=4),
    "stop texts": SEEDED.replace(max_tokens=60, stop=["a", "b", "c", "d", "e", "1", "2"]),
    "n": SEEDED.replace(n=3),
    "n with stop texts": SEEDED.replace(n=3, max_tokens=40, stop=["a", "b", "c", "d"]),
    "logprobs": SEEDED.replace(logprobs=3),
    "prompt logprobs": SEEDED.replace(prompt_logprobs=2),
    "penalties": SEEDED.replace(
        presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2
    ),
    "bad words": SEEDED.replace(bad_words=["a", "b"]),
    "min tokens": SamplingParams(temperature=1.5, seed=9, min_tokens=10, max_tokens=40),
}


def prompts() -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {"prompt_token_ids": torch.randint(3, 272, (n,), generator=generator).tolist()}
        for n in (5, 40, 17, 1, 33, 8, 21)
    ]


def shape(entries) -> list[list[int]]:
    return [list(entry) if entry else [] for entry in entries or ()]


def values(entries) -> list[float]:
    return [item.logprob for entry in entries or () if entry for item in entry.values()]


@pytest.fixture(scope="module")
def pair(make_llama):
    folder = str(make_llama("engine")[0])
    with (
        LLM(folder, overlap=False, **OPTIONS) as plain,
        LLM(folder, overlap=True, **OPTIONS) as overlapping,
    ):
        assert [llm.engine.client.core.executor.max_in_flight for llm in (plain, overlapping)] == [
            1,
            2,
        ]
        yield plain, overlapping


@pytest.mark.parametrize("name", PARAMS)
def test_results_are_the_same(pair, name):
    plain, overlapping = (llm.generate(prompts(), PARAMS[name], use_tqdm=False) for llm in pair)
    for one, two in zip(plain, overlapping, strict=True):
        assert shape(one.prompt_logprobs) == shape(two.prompt_logprobs)
        assert values(one.prompt_logprobs) == pytest.approx(values(two.prompt_logprobs), abs=1e-4)
        for ours, theirs in zip(one.outputs, two.outputs, strict=True):
            assert (ours.token_ids, ours.text, ours.finish_reason) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
            )
            assert ours.stop_reason == theirs.stop_reason
            assert shape(ours.logprobs) == shape(theirs.logprobs)
            assert values(ours.logprobs) == pytest.approx(values(theirs.logprobs), abs=1e-4)


def test_each_step_gives_the_tokens_of_one_step(pair):
    _, llm = pair
    llm.engine.add_request("r", prompts()[0], PARAMS["greedy"])
    counts = []
    while llm.engine.has_unfinished_requests():
        counts += [len(output.outputs[0].token_ids) for output in llm.engine.step()]
    assert counts == list(range(1, 19))


@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_aborts_in_between(pair, after):
    finished = []
    for llm in pair:
        engine = llm.engine
        done = {}
        for i, prompt in enumerate(prompts()):
            engine.add_request(f"{i}", prompt, SEEDED)
        for step in range(200):
            if step == after:
                engine.abort(["1", "4"])
                # Its id is free at once.
                engine.add_request("4", prompts()[4], SEEDED)
            done |= {
                output.request_id: output.outputs[0].token_ids
                for output in engine.step()
                if output.finished
            }
            if not engine.has_unfinished_requests():
                break
        finished.append(done)
        assert engine.client.core.scheduler.blocks.num_used == 0
    assert finished[0] == finished[1]
    assert set(finished[0]) == {"0", "2", "3", "4", "5", "6"}


def test_steps_that_nobody_waits_for_are_no_events(make_llama, watch):
    """One more step is on its way when the last sequence ends; it is taken in whenever there is
    work again."""
    with LLM(str(make_llama("engine")[0]), overlap=True, plugins=[watch], **OPTIONS) as llm:
        # The engine core does not know beforehand where it ends.
        for _ in range(2):
            llm.generate(prompts()[0], PARAMS["stop tokens"], use_tqdm=False)
            assert llm.engine.client.core._in_flight
            time.sleep(1)
        llm.generate(prompts()[0], PARAMS["one token"], use_tqdm=False)
    durations = [event.duration for event in watch.events if isinstance(event, StepEvent)]
    assert 0 < min(durations) <= max(durations) < 1
    assert watch.last("num_used_blocks") == 0
