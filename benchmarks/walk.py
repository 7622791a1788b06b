"""How far a request walks: the files and calls between who asks and the first line of the model's
forward, and the calls of a decode step.

usage: python benchmarks/walk.py [--check] [--verbose]

The embedded model `tiny` is asked in this process, after a warm-up: through `LLM.generate`, and
over HTTP, chat and completions, through the server's app over an `AsyncLLM` whose engine is a
thread. Counted are the project's own files and Python calls, which are the same on every machine.
Who follows a call must open the files that are on the stack at the first line of the forward, and
where the request is handed to the engine's thread; the stack of a task goes on where the task was
created. A decode step has one row; its calls leave out those in the model. `--check`: exit code 1
where a figure is over its limit. `--verbose`: each file (* must be opened), and the calls of each
function.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import httpx
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.frontend.engine_thread import EngineThread
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_server.app import create_app

OFFLINE_FILES = 25
HTTP_FILES = 35
"""Files whose code runs."""
OFFLINE_OPENED = 8
HTTP_OPENED = 10
"""Limits of the files that one must open to follow the call."""
STEP_CALLS = 95
"""Calls of a decode step of one row, the worst of several."""

ROOT = Path(__file__).resolve().parents[1]
STEPS = 16
"""Steps that are measured: as many as a block has tokens, so that one of them gets a new block."""

_FORWARD = LlamaForCausalLM.forward.__code__
_MODEL = (_FORWARD, LlamaForCausalLM.compute_logits.__code__, LlamaForCausalLM.likeliest.__code__)
_HANDED_OVER = EngineThread.submit.__code__


class Function(NamedTuple):
    file: str
    """From the project's root."""
    name: str


class Walk(NamedTuple):
    """Functions that ran between the caller and the model."""

    calls: Counter[Function]
    opened: set[str]
    """The files that one must open."""

    @property
    def files(self) -> set[str]:
        return {function.file for function in self.calls}


class Step(NamedTuple):
    """Functions that a decode step ran outside the model."""

    calls: Counter[Function]
    num_all: int
    """Calls of all Python code, torch's among it."""


class Tracer:
    """Follows the calls of all threads that start after it, from `start` to the first line of the
    model's forward."""

    def __init__(self) -> None:
        self._on = False
        self._called: list[Function] = []
        self._opened: set[str] = set()
        self._creators: WeakKeyDictionary[asyncio.Task[Any], set[str]] = WeakKeyDictionary()
        """The files on the stack where a task was created."""
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def start(self) -> None:
        self._called = []
        self._opened = set()
        self._on = True

    def stop(self) -> Walk:
        assert not self._on, "the model was never called"
        return Walk(Counter(self._called), self._opened)

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        """A task factory, which remembers who created a task."""
        creators = self._stack(sys._getframe(1))
        task = asyncio.Task(coroutine, loop=loop, **options)
        self._creators[task] = creators
        return task

    def _see(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._on or event != "call":
            return
        code = frame.f_code
        if code is _FORWARD:
            self._on = False
        elif function := project_function(code):
            self._called.append(function)
        if code in (_FORWARD, _HANDED_OVER):
            self._opened |= self._stack(frame)

    def _stack(self, frame: FrameType) -> set[str]:
        try:
            task = asyncio.current_task()
        except RuntimeError:
            # In a thread without a loop.
            task = None
        return files_on_stack(frame) | (
            self._creators.get(task, set()) if task is not None else set()
        )


def offline(tracer: Tracer) -> Walk:
    params = SamplingParams(max_tokens=4)
    with LLM(model="tiny") as llm:
        llm.generate("Once upon", params, use_tqdm=False)
        tracer.start()
        llm.generate("Once upon a", params, use_tqdm=False)
        return tracer.stop()


async def over_http(tracer: Tracer) -> dict[str, Walk]:
    """The walk of each route."""
    bodies: dict[str, Callable[[str], dict[str, Any]]] = {
        "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": lambda text: {"prompt": text},
    }
    walks = {}
    asyncio.get_running_loop().set_task_factory(tracer.make_task)
    async with (
        AsyncLLM(VllmConfig.make(model="tiny", engine_process=False)) as llm,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(llm)), base_url="http://walk"
        ) as client,
    ):
        for route, body in bodies.items():
            for text in ("Once upon", "Once upon a"):
                # The engine's thread ends what it does for the request before.
                await asyncio.sleep(0.2)
                tracer.start()
                response = await client.post(
                    route, json={"model": "tiny", "max_tokens": 4, **body(text)}
                )
                response.raise_for_status()
                walks[route] = tracer.stop()
    return walks


def decode_steps() -> list[Step]:
    """Decode steps of one row, after its prompt is computed."""
    with LLM(model="tiny") as llm:
        params = SamplingParams(max_tokens=STEPS + 8, temperature=0, ignore_eos=True)
        llm.engine.add_request("walk", "Once upon a time", params)
        for _ in range(4):
            llm.engine.step()
        return [count_calls(llm.engine.step, without=_MODEL) for _ in range(STEPS)]


def count_calls(function: Callable[[], object], without: Collection[CodeType]) -> Step:
    """The Python calls that a function makes in this thread, but for those of some functions and
    below."""
    called: list[Function] = []
    num_all = depth = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_all, depth
        if event == "call" and (depth or frame.f_code in without):
            depth += 1
        elif event == "return" and depth:
            depth -= 1
        elif event == "call":
            num_all += 1
            if found := project_function(frame.f_code):
                called.append(found)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(before)
    return Step(Counter(called), num_all)


@cache
def project_function(code: CodeType) -> Function | None:
    """None where it is not the project's."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    file = path.relative_to(ROOT)
    if "src" not in file.parts or file.parts[0] not in (
        "core",
        "libs",
        "plugins",
        "contrib_models",
        "contrib_backends",
    ):
        return None
    return Function(str(file), code.co_qualname)


def files_on_stack(frame: FrameType) -> set[str]:
    """The project's, of a call and its callers."""
    found = set()
    one: FrameType | None = frame
    while one is not None:
        if function := project_function(one.f_code):
            found.add(function.file)
        one = one.f_back
    return found


def over(figures: dict[str, tuple[int, int]]) -> Iterator[str]:
    """The figures that are above their limits."""
    for name, (figure, limit) in figures.items():
        if figure > limit:
            yield f"{name}: {figure} is over the limit of {limit}"


def show(calls: Counter[Function], opened: Collection[str] = ()) -> None:
    for file in sorted({function.file for function in calls} | set(opened)):
        print(f"    {'*' if file in opened else ' '} {file}")
        for function, count in calls.most_common():
            if function.file == file:
                print(f"        {count:4} {function.name}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    # Before any thread of an engine starts.
    tracer = Tracer()
    walks = {"LLM.generate": offline(tracer), **asyncio.run(over_http(tracer))}
    figures = {}
    for name, walk in walks.items():
        limits = (
            (OFFLINE_FILES, OFFLINE_OPENED) if name == "LLM.generate" else (HTTP_FILES, HTTP_OPENED)
        )
        files = len(walk.files)
        opened = len(walk.opened)
        figures |= {
            f"{name}, files that run": (files, limits[0]),
            f"{name}, files to open": (opened, limits[1]),
        }
        print(f"{name}: {files} files run, {opened} must be opened, {walk.calls.total()} calls")
        if args.verbose:
            show(walk.calls, walk.opened)
    steps = decode_steps()
    worst = max(steps, key=lambda step: step.calls.total())
    figures["decode step, calls"] = (worst.calls.total(), STEP_CALLS)
    usual = sorted(step.calls.total() for step in steps)[len(steps) // 2]
    print(
        f"decode step: {worst.calls.total()} calls in the worst of {STEPS}, {usual} in the "
        f"median; {worst.num_all} with torch's and others"
    )
    if args.verbose:
        show(worst.calls)
    problems = list(over(figures))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(args.check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
