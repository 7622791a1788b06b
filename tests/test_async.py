"""AsyncLLM, over an engine in a process of its own and in a thread: streams, aborts, bad requests,
deaths, health."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import aclosing

import pytest
from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import EngineDeadError, QueueFullError, RequestError
from toolkit_lm.events import LoadEvent, RequestEvent
from toolkit_lm.plugin import hookimpl

SMALL = {
    "num_kv_blocks": 64,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = GREEDY.replace(max_tokens=100)
BAD_PROMPTS = [
    "",
    {"prompt_token_ids": []},
    {"prompt_token_ids": [40] * 128},
    {"prompt_token_ids": [272]},
    7,
    {"promt": "x"},
]


class Watcher:
    """A plugin that remembers the events."""

    name = "watcher"

    def __init__(self) -> None:
        self.events = []

    @hookimpl
    def toolkit_event(self, event):
        self.events.append(event)

    def load(self) -> LoadEvent:
        return next(event for event in reversed(self.events) if isinstance(event, LoadEvent))

    def of(self, request_id: str) -> list[RequestEvent]:
        return [
            event
            for event in self.events
            if isinstance(event, RequestEvent) and event.request_id == request_id
        ]

    async def idle(self) -> None:
        """Waits until all blocks are back."""
        for _ in range(600):
            load = self.load()
            if not (
                load.num_used_blocks
                or load.num_used_host_blocks
                or load.num_running
                or load.num_waiting
            ):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"blocks leak: {self.load()}")


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def folder(make_llama):
    return str(make_llama("engine")[0])


@pytest.fixture(scope="module", params=["process", "thread"])
def engine(request, folder):
    """One engine for many tests. Its `watcher` sees its events."""
    watcher = Watcher()
    options = {
        "engine_process": None if request.param == "process" else False,
        "swap_memory": "1MiB",
        "preemption_mode": "swap",
    }
    engine = AsyncLLM(VllmConfig.make(model=folder, **SMALL, **options), plugins=[watcher])
    engine.watcher = watcher
    yield engine
    engine.close()


def make_threaded(folder, **options) -> AsyncLLM:
    """An engine that a test can break: it is in this process."""
    return AsyncLLM(VllmConfig.make(model=folder, **SMALL, engine_process=False, **options))


async def ask(engine, prompt="abc", params=GREEDY, **options):
    async for output in engine.generate(prompt, params, **options):
        last = output
    assert last.finished
    return last.outputs[0]


def run(body, seconds=60):
    return asyncio.run(asyncio.wait_for(body, seconds))


class TestStreams:
    def test_a_text_only_grows(self, engine):
        async def body():
            seen = [""]
            tokens = []
            async for output in engine.generate("abc", LONG):
                assert output.outputs[0].text.startswith(seen[-1])
                assert output.outputs[0].token_ids[: len(tokens)] == tokens
                assert len(output.outputs[0].token_ids) > len(tokens)
                seen.append(output.outputs[0].text)
                tokens = output.outputs[0].token_ids
            assert len(tokens) == 100 and output.outputs[0].finish_reason == "length"

        run(body())

    def test_a_slow_caller_gets_the_newest_state(self, engine):
        async def body():
            lengths = []
            async for output in engine.generate("abc", LONG):
                lengths.append(len(output.outputs[0].token_ids))
                await asyncio.sleep(0.3)
            assert lengths[-1] == 100 and len(lengths) < 50

        run(body())

    def test_many_at_once_are_as_each_alone(self, engine):
        async def body():
            prompts = ["abc", "defg", "h"]
            alone = [(await ask(engine, p)).token_ids for p in prompts]
            together = await asyncio.gather(*(ask(engine, p) for p in prompts * 7))
            assert [o.token_ids for o in together] == alone * 7

        run(body())

    def test_event_loops_of_several_threads(self, engine):
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(run(ask(engine)).token_ids))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 4 and len(set(map(tuple, results))) == 1

    def test_chat_with_options(self, engine):
        async def body():
            context = {"traceparent": "00-1"}
            async for output in engine.chat(
                [{"role": "user", "content": "hi"}],
                GREEDY,
                request_id="chat",
                options={"context": context},
            ):
                last = output
            assert len(last.outputs[0].token_ids) == 12
            assert {event.kind: event.context for event in engine.watcher.of("chat")}[
                "finished"
            ] == context

        run(body())

    def test_a_prefix_is_had_from_the_cache_until_it_is_reset(self, engine):
        async def body():
            async def cached():
                async for output in engine.generate(
                    {"prompt_token_ids": list(range(50, 90))}, GREEDY
                ):
                    last = output
                return last.num_cached_tokens

            assert [await cached(), await cached()] == [0, 36]
            await engine.reset_prefix_cache()
            assert await cached() == 0

        run(body())

    def test_a_timeout_ends_a_request(self, engine):
        async def body():
            output = await ask(engine, "abc", LONG, timeout=0.001)
            assert output.finish_reason == "timeout"
            await engine.watcher.idle()

        run(body())


class TestAborts:
    def test_abort_by_id(self, engine):
        async def body():
            async for output in engine.generate("abc", LONG, request_id="mine"):
                await engine.abort("mine")
                last = output
            assert last.outputs[0].finish_reason == "abort"
            await engine.watcher.idle()

        run(body())

    def test_leaving_frees_blocks_and_others_go_on(self, engine):
        async def body():
            async def leave():
                async with aclosing(engine.generate("abc", LONG)) as stream:
                    await anext(stream)

            stayed, *_ = await asyncio.gather(ask(engine, "abc", LONG), leave(), leave())
            assert len(stayed.token_ids) == 100
            await engine.watcher.idle()

        run(body())

    def test_an_id_may_be_used_again_at_once(self, engine):
        """Outputs of the first request that arrive late are not taken for the second's."""

        async def body():
            expected = (await ask(engine, "xyz")).token_ids
            for _ in range(10):
                async with aclosing(engine.generate("abc", LONG, request_id="again")) as stream:
                    await anext(stream)
                assert (await ask(engine, "xyz", request_id="again")).token_ids == expected

        run(body())

    def test_an_abort_during_rendering_counts(self, engine, monkeypatch):
        async def body():
            started = threading.Event()
            render = engine.renderer.render_prompt

            def slow(*args, **kwargs):
                started.set()
                time.sleep(0.2)
                return render(*args, **kwargs)

            monkeypatch.setattr(engine.renderer, "render_prompt", slow)
            task = asyncio.create_task(ask(engine, "abc", LONG, request_id="mine"))
            await asyncio.to_thread(started.wait)
            await engine.abort("mine")
            assert (await task).finish_reason == "abort"

        run(body())

    def test_at_every_stage(self, engine):
        """Queued, in prefill (chunks of 16 tokens), decoding, swapped, with several sequences: by
        id, by leaving, by cancellation."""

        async def one(number, rng):
            params = LONG.replace(n=rng.choice([1, 1, 3]), temperature=1.0, seed=number)
            prompt = {"prompt_token_ids": [40 + number] * rng.choice([3, 20])}
            name = f"storm-{number}"
            way = rng.choice(["abort", "leave", "cancel", "stay"])
            last = None

            async def consume():
                nonlocal last
                async with aclosing(
                    engine.generate(prompt, params.replace(max_tokens=40), request_id=name)
                ) as stream:
                    async for output in stream:
                        last = output
                        if way == "leave" and rng.random() < 0.1:
                            return

            task = asyncio.create_task(consume())
            await asyncio.sleep(rng.random() * 0.4)
            if way == "abort":
                await engine.abort(name)
            elif way == "cancel":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled() or task.exception() is None
            if way == "stay":
                assert [len(o.token_ids) for o in last.outputs] == [40] * params.n

        async def body():
            expected = (await ask(engine)).token_ids
            rng = random.Random(0)
            # Four that stay to their end need 120 blocks, and there are 64.
            crowd = [ask(engine, {"prompt_token_ids": [40] * 20}, LONG) for _ in range(4)]
            storm = [one(number, random.Random(rng.random())) for number in range(40)]
            answers = await asyncio.gather(*crowd, *storm)
            assert [len(answer.token_ids) for answer in answers[:4]] == [100] * 4
            await engine.watcher.idle()
            assert (
                not engine.engine.has_unfinished_requests()
                and engine.engine.queue.num_requests == 0
            )
            assert (await ask(engine)).token_ids == expected
            assert any(
                event.kind == "preempted"
                for event in engine.watcher.events
                if isinstance(event, RequestEvent)
            )

        run(body())


class TestBadRequests:
    def test_they_raise_and_spare_others(self, engine):
        async def body():
            async def bad(prompt, **options):
                with pytest.raises(RequestError):
                    await ask(engine, prompt, **options)

            good = [ask(engine, "abc", LONG) for _ in range(2)]
            named = [
                bad("abc", request_id=["a"]),
                bad("abc", priority="high"),
                bad("abc", timeout=-1),
                bad("abc", promt=1),
            ]
            outputs = await asyncio.gather(*good, *(bad(prompt) for prompt in BAD_PROMPTS), *named)
            assert [len(o.token_ids) for o in outputs[:2]] == [100, 100]

        run(body())

    def test_an_id_in_use_is_refused(self, engine):
        async def body():
            results = await asyncio.gather(
                ask(engine, request_id="same"),
                ask(engine, request_id="same"),
                return_exceptions=True,
            )
            assert sum(isinstance(r, RequestError) and "in use" in str(r) for r in results) == 1
            assert sum(hasattr(r, "token_ids") for r in results) == 1

        run(body())

    def test_a_failing_submit_is_its_callers(self, engine, monkeypatch):
        async def body():
            def broken(*args, **kwargs):
                raise KeyError("no client")

            monkeypatch.setattr(engine.engine.client, "add", broken)
            with pytest.raises(KeyError):
                await ask(engine)
            monkeypatch.undo()
            assert len((await ask(engine)).token_ids) == 12

        run(body())

    def test_a_full_queue_refuses_before_the_first_output(self, folder):
        async def body():
            async with make_threaded(folder, max_queued_requests=3) as engine:
                results = await asyncio.gather(
                    *(ask(engine, "abc", LONG) for _ in range(60)), return_exceptions=True
                )
                refused = [r for r in results if isinstance(r, QueueFullError)]
                assert refused and all(1 <= r.retry_after <= 60 for r in refused)
                assert len(refused) + sum(hasattr(r, "token_ids") for r in results) == 60
                assert len((await ask(engine)).token_ids) == 12

        run(body())


class TestEnds:
    def test_a_dead_engine_says_why(self, folder):
        async def body():
            async with make_threaded(folder) as engine:

                def broken(plan):
                    raise MemoryError("out of blocks of wood")

                engine.engine.client.core.executor.runner.execute = broken
                for _ in range(2):
                    with pytest.raises(EngineDeadError, match="out of blocks of wood"):
                        await ask(engine)
                assert (
                    engine.health().status == "dead"
                    and "out of blocks of wood" in engine.health().reason
                )
                await engine.abort("any")
                with pytest.raises(EngineDeadError):
                    await engine.reset_prefix_cache()

        run(body())

    def test_everybody_is_answered_at_shutdown(self, folder):
        async def body():
            engine = make_threaded(folder)
            execute = engine.engine.client.core.executor.runner.execute

            def slow(plan):
                time.sleep(0.1)
                return execute(plan)

            engine.engine.client.core.executor.runner.execute = slow
            tasks = [asyncio.create_task(ask(engine, "abc", LONG)) for _ in range(3)]
            await asyncio.sleep(0.3)
            closing = [asyncio.ensure_future(engine.aclose()) for _ in range(2)]
            tasks += [asyncio.create_task(ask(engine, "abc", LONG)) for _ in range(3)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(r, EngineDeadError) and "shut down" in str(r) for r in results)
            await asyncio.gather(*closing)
            with pytest.raises(EngineDeadError, match="shut down"):
                await ask(engine)
            assert engine.health().status == "closed"

        run(body())

    def test_a_stall_shows_is_dumped_and_passes(self, folder, monkeypatch, caplog):
        async def body():
            async with make_threaded(folder, step_timeout=0.4) as engine:
                await asyncio.sleep(0.6)
                assert engine.health().status == "ready", "an idle engine does not stall"
                dumps = []
                stuck = threading.Event()
                monkeypatch.setattr(engine.engine.client, "dump_stacks", lambda: dumps.append(1))
                execute = engine.engine.client.core.executor.runner.execute
                monkeypatch.setattr(
                    engine.engine.client.core.executor.runner,
                    "execute",
                    lambda plan: (stuck.wait(), execute(plan))[1],
                )
                task = asyncio.create_task(ask(engine))
                await until(lambda: engine.health().status == "stalled")
                assert "step_timeout" in engine.health().reason
                await asyncio.sleep(0.6)
                assert dumps == [1]
                stuck.set()
                assert len((await task).token_ids) == 12
                assert engine.health().status == "ready"
                await until(lambda: "progress again" in caplog.text)
                assert "no progress" in caplog.text

        run(body())
