"""The loop of the engine process: the order in which commands and steps are taken."""

from __future__ import annotations

import numpy as np
import pytest
import zmq
from toolkit_lm.engine import wire
from toolkit_lm.engine.process import loop
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.messages import (
    Array,
    EngineOutputs,
    EngineRequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
)
from toolkit_lm.params import SamplingParams


class Core:
    """Writes down what it is told."""

    progress_time = 0.0
    has_unfinished = True
    num_idle = 0

    def __init__(self) -> None:
        self.told: list[str] = []

    def add_request(self, request):
        self.told.append(request.request_id)

    def finish(self, request_id, reason, index):
        self.told.append(f"finish {request_id}")


class Socket:
    def __init__(self, *commands) -> None:
        self.messages = [wire.encode(one) for one in commands]

    def recv(self, flags=0):
        if not self.messages:
            raise zmq.Again
        return self.messages.pop(0)

    def poll(self, timeout):
        return bool(self.messages)


def call(name: str, count: int, n: int = 128) -> wire.Add:
    params = SamplingParams(n=n)
    return wire.add(
        [
            EngineRequest(request_id=f"{name}{i}", prompt_token_ids=[1], params=params)
            for i in range(count)
        ]
    )


def take(core: Core, engine_loop: loop._Loop) -> list[str]:
    core.told = []
    engine_loop._handle_commands()
    return core.told


def test_a_step_comes_before_all_of_many_sequences_are_added(monkeypatch):
    monkeypatch.setattr(loop, "_SEQUENCES_AT_ONCE", 256)
    core = Core()
    socket = Socket(call("a", 5))
    engine_loop = loop._Loop(core, socket)
    assert take(core, engine_loop) == ["a0", "a1"]
    # A small call takes its turn.
    socket.messages.append(wire.encode(call("b", 1, n=1)))
    assert take(core, engine_loop) == ["a2", "b0", "a3"]
    assert take(core, engine_loop) == ["a4"]
    assert take(core, engine_loop) == []


def test_a_command_comes_after_what_was_sent_before_it(monkeypatch):
    monkeypatch.setattr(loop, "_SEQUENCES_AT_ONCE", 128)
    core = Core()
    engine_loop = loop._Loop(
        core, Socket(call("a", 3), wire.Finish("a2", "abort", None), call("b", 1))
    )
    assert take(core, engine_loop) == ["a0", "a1", "a2", "finish a2", "b0"]


def test_refusals_of_a_later_step_are_sent(monkeypatch):
    """Though neither a command came nor the engine got on."""
    monkeypatch.setattr(loop, "_SEQUENCES_AT_ONCE", 1)

    class Refusing(Core):
        has_unfinished = False

        def add_request(self, request):
            raise ValueError(request.request_id)

        def poll_outputs(self):
            return EngineOutputs(time=0.0)

    class FullError(Exception):
        pass

    class Recording(Socket):
        def __init__(self, *commands) -> None:
            super().__init__(*commands)
            self.refused: list[str] = []

        def send(self, message, copy):
            self.refused += [one.request_id for one in wire.decode_report(message).outputs.outputs]
            if len(self.refused) == 3:
                raise FullError

    socket = Recording(call("a", 3, n=1))
    with pytest.raises(FullError):
        loop._Loop(Refusing(), socket).run()
    assert socket.refused == ["a0", "a1", "a2"]


def test_an_idle_engine_goes_on_adding(monkeypatch):
    """It does not wait for a command while there is something to add."""
    monkeypatch.setattr(loop, "_SEQUENCES_AT_ONCE", 1)
    core = Core()
    core.has_unfinished = False
    engine_loop = loop._Loop(core, Socket(call("a", 2)))
    assert take(core, engine_loop) + take(core, engine_loop) == ["a0", "a1"]


def test_a_request_whose_data_is_not_there_is_asked_for_again():
    """The others of its message go on. Each front is told what the engine keeps by what it
    sends."""
    data = {"pixels": Array.of(np.arange(9.0))}

    def seeing(name, *items):
        features = [
            MultiModalFeatureSpec(
                modality="image",
                mm_identifier=item,
                mm_position=PlaceholderRange(i, 1),
                data=data if sent else None,
            )
            for i, (item, sent) in enumerate(items)
        ]
        return EngineRequest(
            request_id=name, prompt_token_ids=[1] * 9, params=SamplingParams(), features=features
        )

    class Keeping(Core):
        has_unfinished = False

        def add_request(self, request):
            super().add_request(request)
            assert all(
                np.array_equal(one.data["pixels"].to_numpy(), np.arange(9.0))
                for one in request.features
            )

        def poll_outputs(self):
            return EngineOutputs(time=0.0)

    class NothingMoreError(Exception):
        pass

    class Recording(Socket):
        def poll(self, timeout):
            return True

        def recv(self, flags=0):
            if not self.messages and not flags:
                raise NothingMoreError
            return super().recv(flags)

        def send(self, message, copy):
            missing.append(wire.decode_report(message).outputs.missing)

    core = Keeping()
    missing = []
    first = wire.add(
        [
            seeing("a", ("x", True), ("y", True)),
            seeing("b", ("x", False)),
            seeing("c", ("x", False), ("z", False)),
        ],
        ["y"],
    )
    socket = Recording(first)
    engine_loop = loop._Loop(core, socket)
    for more in (
        [],
        [wire.add([seeing("d", ("x", False)), seeing("e", ("y", False))])],
        [wire.add([seeing("f", ("x", True))])],
    ):
        socket.messages += [wire.encode(one) for one in more]
        with pytest.raises(NothingMoreError):
            engine_loop.run()
    assert core.told == ["a", "b", "d", "f"]
    assert missing == [{"c": ["z"]}, {"e": ["y"]}, None]


def test_an_idle_engine_looks_at_its_workers():
    class Executor:
        looks = 0

        def check(self):
            self.looks += 1
            if self.looks == 3:
                raise EngineDeadError("the worker has died")

    core = Core()
    core.has_unfinished = False
    core.executor = Executor()
    with pytest.raises(EngineDeadError, match="the worker has died"):
        loop._Loop(core, Socket())._handle_commands()
