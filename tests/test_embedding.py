"""Engines inside other people's programs: nothing of the host is touched, and they work wherever
Python code runs."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import closing
from types import FunctionType

import psutil
import pytest
import torch
from processes import wait_until_gone
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.frontend import LLMEngine

SMALL = {"model": "tiny", "num_kv_blocks": 64, "max_model_len": 256, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
KINDS = pytest.mark.parametrize("process", [True, False], ids=["process", "thread"])

NO_GUARD = """
    import asyncio
    import sys
    from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig

    llm = AsyncLLM(VllmConfig.make(model="tiny", num_kv_blocks=64, max_model_len=256))

    async def main():
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        async for output in llm.generate("Once", params):
            pass
        print(len(output.outputs[0].token_ids))

    asyncio.run(main())
    for heavy in ("torch", "transformers"):
        assert heavy not in sys.modules, heavy
    print(llm.engine.client.process.pid)
"""
NOT_CLOSED = """
    import asyncio
    from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig

    config = VllmConfig.make(
        model="tiny", num_kv_blocks=64, max_model_len=256, engine_process={process}
    )
    llm = AsyncLLM(config)

    async def main():
        params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
        async for output in llm.generate("Once", params):
            break

    asyncio.run(main())
"""


async def ask(llm, params=GREEDY):
    async for output in llm.generate("Once", params):
        last = output
    return last.outputs[0].token_ids


def run_script(text: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-"],
        input=textwrap.dedent(text),
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


class TestWherever:
    def test_a_script_without_a_main_guard_imports_no_torch_and_need_not_close(self):
        done = run_script(NO_GUARD)
        assert done.returncode == 0, done.stderr
        length, pid = done.stdout.split()
        assert length == "8" and done.stderr == ""
        wait_until_gone(int(pid))

    def test_a_script_that_leaves_in_the_middle(self):
        """Without a process of its own, too, the interpreter's exit neither hangs nor crashes."""
        done = run_script(NOT_CLOSED.format(process=False))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_like_a_notebook(self):
        """Code in cells, executed in a thread whose event loop runs all the time; constructors
        block it, as they do there."""
        cells = [
            (
                "from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig\nllm = "
                "AsyncLLM(VllmConfig.make(**SMALL))"
            ),
            (
                "async for output in llm.generate('Once', SamplingParams(max_tokens=8, "
                "temperature=0, ignore_eos=True)): last = output"
            ),
            "count = len(last.outputs[0].token_ids)\nawait llm.aclose()",
        ]
        names = {"SMALL": SMALL}

        async def kernel():
            for cell in cells:
                code = compile(cell, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                result = FunctionType(code, names)()
                if asyncio.iscoroutine(result):
                    await result

        thread = threading.Thread(target=lambda: asyncio.run(kernel()))
        thread.start()
        thread.join(60)
        assert names["count"] == 8

    def test_two_engines_of_both_kinds_in_one_process(self):
        async def body():
            async with (
                AsyncLLM(VllmConfig.make(**SMALL)) as one,
                AsyncLLM(VllmConfig.make(**SMALL, engine_process=False)) as two,
            ):
                with LLM(**SMALL) as three:
                    expected = (
                        three.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
                    )
                    assert (
                        await asyncio.gather(ask(one), ask(two), ask(one), ask(two))
                        == [expected] * 4
                    )
                    await one.aclose()
                    assert await ask(two) == expected

        asyncio.run(body())

    def test_made_while_an_event_loop_runs(self):
        """Without waiting, the event loop goes on while the engine loads."""

        async def body():
            llm = AsyncLLM(VllmConfig.make(**SMALL), wait=False)
            ticks = 0
            waiting = asyncio.create_task(llm.wait_ready())
            while not waiting.done():
                await asyncio.sleep(0.01)
                ticks += 1
            await waiting
            assert ticks > 10 and llm.health().status == "ready"
            assert len(await ask(llm)) == 8
            await llm.aclose()

        asyncio.run(body())


class TestUntouched:
    @KINDS
    def test_the_host(self, process):
        def state():
            root = logging.getLogger()
            return {
                "root logger": (
                    root.level,
                    list(root.handlers),
                    logging.getLogger("toolkit_lm").handlers,
                ),
                "signals": [signal.getsignal(number) for number in signal.valid_signals()],
                "environment": dict(os.environ),
                "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
                "affinity": os.sched_getaffinity(0),
                "folder": os.getcwd(),
                "path": list(sys.path),
            }

        async def body():
            before = state()
            async with AsyncLLM(VllmConfig.make(**SMALL, engine_process=process)) as llm:
                await ask(llm)
                assert state() == before
            assert state() == before

        asyncio.run(body())

    @KINDS
    def test_no_thread_no_file_and_no_process_is_left(self, process):
        me = psutil.Process()
        others = set(threading.enumerate())

        async def body():
            async with AsyncLLM(VllmConfig.make(**SMALL, engine_process=process)) as llm:
                await ask(llm)

        asyncio.run(body())
        gc.collect()
        threads = {t.name for t in threading.enumerate()}
        files = me.num_fds()
        children = me.children()
        asyncio.run(body())
        gc.collect()
        # The watchdog ends at its next look.
        end = time.monotonic() + 30
        while {t.name for t in threading.enumerate()} != threads:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert not [
            t.name
            for t in threading.enumerate()
            if t.name.startswith("toolkit_lm") and t not in others
        ]
        assert me.num_fds() == files
        assert me.children() == children


def in_a_fork(use) -> str:
    """Error or result of `use` in a child of os.fork()."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(120)
        try:
            text = repr(use())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with open(reads) as read:
        text = read.read()
    assert os.waitpid(child, 0)[1] == 0, "it hung"
    return text


class TestForks:
    """An engine that was made before a fork says so in the child, and goes on in the parent."""

    def check(self, use) -> None:
        text = in_a_fork(use)
        assert text.startswith(
            f"EngineDeadError: the engine was made in process {os.getpid()} before os.fork(), "
            "and cannot be used in"
        )
        assert (
            "Make the engine in the child" in text
            and "multiprocessing.get_context('spawn')" in text
        )

    @KINDS
    def test_llm(self, process):
        with LLM(**SMALL, engine_process=process) as llm:
            expected = llm.generate("Once", GREEDY, use_tqdm=False)
            self.check(lambda: llm.generate("Once", GREEDY, use_tqdm=False))
            self.check(lambda: llm.reset_prefix_cache())
            # A child that leaves the block ends nothing but itself.
            assert in_a_fork(llm.close) == "None"
            assert llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs == expected[0].outputs

    @KINDS
    def test_llm_engine(self, process):
        with LLMEngine(VllmConfig.make(**SMALL, engine_process=process)) as engine:
            self.check(lambda: engine.add_request("1", "Once", GREEDY))
            self.check(lambda: engine.wait_ready())
            engine.add_request("1", "Once", GREEDY)
            while engine.has_unfinished_requests():
                last = engine.step()
            assert len(last[0].outputs[0].token_ids) == 8

    @KINDS
    def test_async_llm(self, process):
        with closing(AsyncLLM(VllmConfig.make(**SMALL, engine_process=process))) as llm:
            self.check(lambda: asyncio.run(ask(llm)))
            self.check(lambda: asyncio.run(llm.wait_ready()))
            self.check(lambda: asyncio.run(llm.reset_prefix_cache()))
            assert in_a_fork(llm.close) == "None"
            assert len(asyncio.run(ask(llm))) == 8

    def test_a_fork_while_the_engine_starts(self):
        with LLMEngine(VllmConfig.make(**SMALL, engine_process=True), wait=False) as engine:
            self.check(lambda: engine.wait_ready())
            assert in_a_fork(engine.close) == "None"
            assert engine.wait_ready()

    def test_an_engine_that_is_made_in_the_child_works(self):
        with LLM(**SMALL, engine_process=True):

            def use() -> int:
                with LLM(**SMALL, engine_process=True) as llm:
                    return len(llm.generate("Once", GREEDY, use_tqdm=False)[0].outputs[0].token_ids)

            assert in_a_fork(use) == "8"


class TestEnds:
    @KINDS
    def test_shutdown_with_work_under_way(self, process):
        # 64 requests for 8 places: however fast a step is, most of them wait when the engine ends.
        async def body():
            llm = AsyncLLM(VllmConfig.make(**SMALL, engine_process=process))
            tasks = [
                asyncio.create_task(ask(llm, GREEDY.replace(max_tokens=200))) for _ in range(64)
            ]
            await llm.wait_ready()
            await asyncio.sleep(0.05)
            start = time.monotonic()
            await llm.aclose()
            assert time.monotonic() - start < 8
            await llm.aclose()
            llm.close()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            assert isinstance(answers[-1], Exception)
            assert all(isinstance(answer, Exception) or len(answer) == 200 for answer in answers)

        asyncio.run(body())

    def test_a_forgotten_engine_ends(self):
        async def body():
            llm = AsyncLLM(VllmConfig.make(**SMALL))
            await ask(llm)
            return llm.engine.client.process.pid

        pid = asyncio.run(body())
        gc.collect()
        wait_until_gone(pid)
