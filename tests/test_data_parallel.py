"""Several engines behind one front give what one gives, also where some of them die."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import psutil
import pytest
from processes import wait_until_gone
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError, EngineDeadError, ToolkitError
from toolkit_lm.events import LoadEvent, RequestEvent
from toolkit_lm.outputs import CompletionOutput, RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.plugin import hookimpl

# It holds a request of max_model_len, and not all that run. Prompts are computed in chunks.
PLUGINS = [
    "tiny",
    "decoder",
    "loaders",
    "sdpa",
    "cpu",
    "renderer_hf",
    "sampling_extra",
    "structured_output",
    "llguidance",
    "data_parallel",
]
TIGHT = {
    "model": "tiny",
    "max_model_len": 128,
    "num_kv_blocks": 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "plugins": PLUGINS,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
KINDS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.2, seed=5, max_tokens=20, ignore_eos=True, top_p=0.9),
    "four": SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=16, logprobs=2),
    "best of three": SamplingParams(n=2, best_of=3, temperature=1.0, seed=3, max_tokens=10),
    "beams": SamplingParams(n=2, use_beam_search=True, beam_width=3, max_tokens=8),
    "prompt": SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.8,
        seed=1,
        max_tokens=24,
        min_tokens=8,
        presence_penalty=1.0,
        repetition_penalty=1.2,
        stop=["e ", "a"],
    ),
    "grammar": SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=24,
        structured_outputs={"regex": "[a-z]{3} [0-9]{6,9} [a-z]{4}"},
    ),
    "mirostat": SamplingParams(
        temperature=1.0, seed=4, max_tokens=20, ignore_eos=True, extra_args={"mirostat_tau": 3.0}
    ),
}
"""All ways in which a request could go on otherwise than it began."""


def prompts(count: int) -> list[str]:
    """Three stories, of which many begin alike."""
    stories = [
        "Once upon a time there was a little bird who lived in a tree near the house of",
        "The weather of today is cold, and so it",
        "Dear",
    ]
    return [f"{stories[i % 3]} {'very ' * (i % 5)}{i}" for i in range(count)]


def said(output: RequestOutput) -> list[Any]:
    """Results on which one engine and several must agree."""
    assert output.error is None
    known = [(c.index, c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
    logprobs = [
        [list(entry) for entry in c.logprobs] if c.logprobs else None for c in output.outputs
    ]
    of_prompt = [entry and list(entry) for entry in output.prompt_logprobs or ()]
    return [known, logprobs, of_prompt]


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """All that the outputs of a stream hold, of which each has what is new."""
    whole: dict[int, CompletionOutput] = {}
    for output in outputs:
        for one in output.outputs:
            if (known := whole.get(one.index)) is not None:
                logprobs = [*(known.logprobs or ()), *(one.logprobs or ())]
                one = replace(
                    one,
                    text=known.text + one.text,
                    token_ids=known.token_ids + one.token_ids,
                    logprobs=logprobs or None,
                )
            whole[one.index] = one
    of_prompt = next((output.prompt_logprobs for output in outputs if output.prompt_logprobs), None)
    return replace(
        outputs[-1], outputs=[whole[index] for index in sorted(whole)], prompt_logprobs=of_prompt
    )


class Watch:
    name = "watch"

    def __init__(self) -> None:
        self.events: list[Any] = []

    @hookimpl
    def toolkit_event(self, event):
        self.events.append(event)

    def kinds(self) -> Counter[str]:
        return Counter(event.kind for event in self.events if isinstance(event, RequestEvent))


@pytest.fixture(scope="module")
def alone():
    with LLM(**TIGHT) as llm:
        yield llm


@pytest.fixture(scope="module")
def watch():
    return Watch()


@pytest.fixture(scope="module")
def two(watch):
    with LLM(config=VllmConfig.make(**TIGHT, data_parallel_size=2), plugins=[watch]) as llm:
        yield llm


@pytest.mark.parametrize("kind", KINDS)
def test_two_engines_give_what_one_gives(alone, two, watch, kind):
    """In chunks, with preemptions, and with cached prefixes."""
    watch.events.clear()
    given = prompts(24)
    expected = list(map(said, alone.generate(given, KINDS[kind], use_tqdm=False)))
    assert list(map(said, two.generate(given, KINDS[kind], use_tqdm=False))) == expected
    assert {event.engine for event in watch.events} == {0, 1}
    # The engine's reply to ends that the front has found comes later.
    end = time.monotonic() + 10
    while watch.kinds()["finished"] < 24 and time.monotonic() < end:
        two.engine.advance(0.1)
    assert watch.kinds()["finished"] == watch.kinds()["queued"] == 24
    assert (
        [state.num_requests for state in two.engine.client.engines]
        == [state.num_tokens for state in two.engine.client.engines]
        == [0, 0]
    )


def test_it_was_preempted_and_found_prefixes(two, watch):
    watch.events.clear()
    two.generate(prompts(32), KINDS["seeded"].replace(max_tokens=90), use_tqdm=False)
    assert watch.kinds()["preempted"] > 0
    assert any(event.num_cached_tokens for event in watch.events if isinstance(event, RequestEvent))


def test_each_has_cores_of_its_own(two):
    cores = [set(psutil.Process(state.pid).cpu_affinity()) for state in two.engine.client.engines]
    assert len(os.sched_getaffinity(0)) < 2 or not cores[0] & cores[1]


def test_a_wrong_request_is_one_engines_and_no_others(two):
    [good, bad] = [two.engine.processor.prepare(name, "Once", GREEDY) for name in ("good", "bad")]
    bad.message.context["x"] = object()
    with pytest.raises(ToolkitError, match="cannot be sent"):
        two.engine.submit_batch([good, bad])
    assert [state.num_requests for state in two.engine.client.engines] == [0, 0]
    assert len(two.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


async def everything(
    llm: AsyncLLM, count: int, kinds: list[str], num_done: list[int] | None = None
) -> list[list[Any]]:
    """Results of `count` requests, of all kinds. `num_done`: counts of finished requests and of
    tokens."""

    async def ask(number: int, prompt: str) -> list[Any]:
        outputs = []
        # Every other one as the server's streams do.
        how = {"output_kind": RequestOutputKind.DELTA} if number % 2 else {}
        async for output in llm.generate(
            prompt, KINDS[kinds[number % len(kinds)]].replace(**how), request_id=f"r{number}"
        ):
            if num_done is not None:
                num_done[1] += 1
            outputs.append(output)
        if num_done is not None:
            num_done[0] += 1
        return said(joined(outputs) if how else outputs[-1])

    return await asyncio.gather(
        *(ask(number, prompt) for number, prompt in enumerate(prompts(count)))
    )


def run(body) -> Any:
    return asyncio.run(asyncio.wait_for(body, 280))


def kill(llm: AsyncLLM, engine: int) -> None:
    os.kill(llm.engines[engine].pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(alone):
    """Results of the lone engine, with the kinds in turns."""
    kinds = list(KINDS)
    given = prompts(len(kinds) * 6)
    by_kind = {
        kind: alone.generate(given[index :: len(kinds)], KINDS[kind], use_tqdm=False)
        for index, kind in enumerate(kinds)
    }
    return [
        said(by_kind[kinds[number % len(kinds)]][number // len(kinds)])
        for number in range(len(given))
    ]


@pytest.mark.parametrize("restarts", [1, pytest.param(0, marks=pytest.mark.nightly)])
def test_nobody_hears_of_an_engine_that_dies(expected, restarts):
    watch = Watch()

    async def body():
        async with AsyncLLM(
            VllmConfig.make(**TIGHT, data_parallel_size=2, restart_engine=restarts), plugins=[watch]
        ) as llm:
            num_done = [0, 0]
            asked = asyncio.create_task(everything(llm, len(expected), list(KINDS), num_done))
            while num_done[1] < 60:
                await asyncio.sleep(0.005)
            kill(llm, 0)
            before = num_done[0]
            found = await asked
            assert before < len(expected)
            assert found == expected
            states = llm.engines
            assert [one.status for one in states] == ["restarting" if restarts else "dead", "ready"]
            assert llm.health().status == "ready"
            if restarts:
                while llm.engines[0].status != "ready":
                    await asyncio.sleep(0.05)
                assert await everything(llm, len(expected), list(KINDS)) == expected
                assert llm.num_restarts == 1

    run(body())
    done = len(expected) * (1 + restarts)
    assert (
        watch.kinds()["finished"]
        == watch.kinds()["first_token"]
        == watch.kinds()["scheduled"]
        == done
    )
    loads = [event for event in watch.events if isinstance(event, LoadEvent)]
    assert {
        (one.num_running, one.num_waiting)
        for engine in (0, 1)
        for one in [e for e in loads if e.engine == engine][-1:]
    } == {(0, 0)}


@pytest.mark.nightly
def test_five_hundred_requests_and_a_kill(alone):
    """None is lost, and every answer is that of the lone engine."""
    kinds = list(KINDS)
    given = prompts(500)
    lone = [None] * 500
    for index, kind in enumerate(kinds):
        for number, output in zip(
            range(index, 500, len(kinds)),
            alone.generate(given[index :: len(kinds)], KINDS[kind], use_tqdm=False),
            strict=True,
        ):
            lone[number] = said(output)

    async def body():
        async with AsyncLLM(
            VllmConfig.make(**TIGHT, data_parallel_size=2, restart_engine=1)
        ) as llm:
            num_done = [0, 0]
            asked = asyncio.create_task(everything(llm, 500, kinds, num_done))
            while num_done[0] < 200:
                await asyncio.sleep(0.01)
            kill(llm, 1)
            assert await asked == lone

    run(body())


def test_when_all_have_died_their_requests_wait_for_the_next(expected):
    async def body():
        async with AsyncLLM(
            VllmConfig.make(**TIGHT, data_parallel_size=2, restart_engine=1)
        ) as llm:
            num_done = [0, 0]
            asked = asyncio.create_task(everything(llm, len(expected), list(KINDS), num_done))
            while num_done[1] < 60:
                await asyncio.sleep(0.005)
            kill(llm, 0)
            kill(llm, 1)
            while llm.health().status != "restarting":
                await asyncio.sleep(0.01)
            assert await asked == expected
            assert llm.num_restarts == 2

    run(body())


def test_a_request_under_which_too_many_die_fails_alone():
    """It may be what they die of."""

    async def body():
        options = {
            **TIGHT,
            "data_parallel_size": 2,
            "restart_engine": 5,
            "plugin_option": {"data_parallel": {"max_moves": 0}},
        }
        async with AsyncLLM(VllmConfig.make(**options)) as llm:
            asked = [
                asyncio.create_task(last(llm, f"Once {i}", GREEDY.replace(max_tokens=100)))
                for i in range(2)
            ]
            while sum(one.num_requests for one in llm.engines) < 2:
                await asyncio.sleep(0.01)
            assert [one.num_requests for one in llm.engines] == [1, 1]
            kill(llm, 0)
            ended = [await one for one in asked]
            assert sorted(one.outputs[0].finish_reason for one in ended) == ["error", "length"]
            [error] = [one.error for one in ended if one.error]
            assert error.startswith(
                "1 engines have died under the request (the most is data_parallel.max_moves, 0). "
                "The last: engine 0 of 2"
            )

    run(body())


async def last(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    found = None
    async for output in llm.generate(prompt, params):
        found = output
    return found


def test_aborted_requests_leave_nothing_behind_and_dead_engines_a_cause(alone):
    params = KINDS["penalties"]
    [lone] = alone.generate("Once upon a time", params, use_tqdm=False)

    async def body():
        async with AsyncLLM(VllmConfig.make(**TIGHT, data_parallel_size=2)) as llm:
            tasks = [
                asyncio.create_task(last(llm, f"Once {i}", GREEDY.replace(max_tokens=100, n=2)))
                for i in range(6)
            ]
            await asyncio.sleep(0.2)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert said(await last(llm, "Once upon a time", params)) == said(lone)
            while [(one.num_requests, one.num_tokens) for one in llm.engines] != [(0, 0)] * 2:
                await asyncio.sleep(0.02)
            # When none is left, requests fail with the cause.
            asked = asyncio.gather(
                *(last(llm, f"Once {i}", GREEDY.replace(max_tokens=100)) for i in range(8))
            )
            while sum(one.num_requests for one in llm.engines) < 8:
                await asyncio.sleep(0.01)
            kill(llm, 0)
            kill(llm, 1)
            with pytest.raises(
                EngineDeadError,
                match=r"all 2 engines have died, the last of this: engine [01] of 2: .* killed "
                r"by SIGKILL",
            ):
                await asked
            assert llm.health().status == "dead"
            assert {one.status for one in llm.engines} == {"dead"}

    run(body())


@pytest.mark.parametrize(
    "options, error",
    [
        ({"engine_process": False}, "engine_process is False"),
        ({"device": "cuda:1"}, "is one device"),
    ],
)
def test_what_cannot_be_is_refused(options, error):
    with pytest.raises(ConfigError, match=error):
        LLM(**TIGHT | options, data_parallel_size=2)


def test_an_engine_that_does_not_start_is_named():
    start = time.monotonic()
    with pytest.raises(
        ToolkitError, match=r"^engine [01] of 2: the KV cache cannot hold one sequence"
    ):
        LLM(**{**TIGHT, "num_kv_blocks": 2}, data_parallel_size=2)
    assert time.monotonic() - start < 60


FRONT = """
    import os, sys, time
    from toolkit_lm import LLM
    from toolkit_lm.errors import EngineDeadError
    options = {options!r}
    llm = LLM(**options, data_parallel_size=2)
    if os.fork() == 0:
        try:
            llm.generate("Once", use_tqdm=False)
        except EngineDeadError as error:
            print(str(error), flush=True)
        os._exit(0)
    os.wait()
    print(*(one.pid for one in llm.engine.client.engines), flush=True)
    time.sleep(60)
"""


def test_all_engines_end_with_their_front_and_serve_no_fork_of_it():
    code = textwrap.dedent(FRONT).format(options=TIGHT)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as front:
        assert "cannot be used in its child" in front.stdout.readline()
        engines = [psutil.Process(int(pid)) for pid in front.stdout.readline().split()]
        front.kill()
        assert len(engines) == 2
        wait_until_gone(*engines)
