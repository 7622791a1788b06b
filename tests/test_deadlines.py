"""Deadlines: a request ends with "timeout" wherever it is, keeps what it has, and gives back what
it holds."""

from __future__ import annotations

import time
from itertools import count

import pytest
from toolkit_lm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(request, make_llama, watch):
    options = {
        "num_kv_blocks": 64,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 1,
        "overlap": request.param,
    }
    with LLM(str(make_llama("engine")[0]), plugins=[watch], **options) as llm:
        yield llm


def finish_all(llm: LLM) -> dict[str, tuple[str | None, list[int]]]:
    """Reason of the end, and tokens, by request."""
    done = {}
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.finished:
                done[output.request_id] = (
                    output.outputs[0].finish_reason,
                    output.outputs[0].token_ids,
                )
    return done


def test_in_the_queue_and_in_the_batch(llm, watch, monkeypatch):
    (whole,) = llm.generate({"prompt_token_ids": [7, 8, 9]}, GREEDY, use_tqdm=False)
    runner = llm.engine.client.core.executor.runner
    start = time.monotonic()
    execute = runner.execute
    steps = count()

    def slow(plan):
        # A few steps are soon over, and the times pass within two others.
        over = {3: start + 1.1, 6: start + 2.1}.get(next(steps), 0)
        time.sleep(max(0, over - time.monotonic()))
        return execute(plan)

    monkeypatch.setattr(runner, "execute", slow)
    for name, timeout in (("runs", 2), ("waits", 1), ("next", None)):
        llm.engine.add_request(name, {"prompt_token_ids": [7, 8, 9]}, GREEDY, timeout=timeout)
    done = finish_all(llm)
    assert list(done) == ["waits", "runs", "next"]
    assert done["waits"] == ("timeout", [])
    reason, tokens = done["runs"]
    assert reason == "timeout"
    assert 0 < len(tokens) < 30
    assert tokens == whole.outputs[0].token_ids[: len(tokens)]
    assert done["next"] == ("length", whole.outputs[0].token_ids)
    assert watch.count("aborted") == 2
    assert watch.last("num_used_blocks") == 0


def test_one_that_is_over_before_it_begins(llm):
    llm.engine.add_request("r", {"prompt_token_ids": [7, 8, 9]}, GREEDY, timeout=1e-6)
    time.sleep(0.001)
    assert finish_all(llm) == {"r": ("timeout", [])}


def test_one_that_is_met_does_nothing(llm):
    llm.engine.add_request("r", {"prompt_token_ids": [7, 8, 9]}, GREEDY, timeout=60.0)
    assert finish_all(llm)["r"][0] == "length"
