"""Full garbage collections come when they are short."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
from toolkit_lm_server import garbage


@pytest.fixture
def made(monkeypatch):
    calls = []
    clock, held = SimpleNamespace(now=100.0), []
    fake = SimpleNamespace(
        freeze=lambda: calls.append("freeze"),
        set_threshold=lambda *sizes: calls.append(sizes),
        get_objects=lambda generation: held if generation == 2 else None,
        collect=lambda: calls.append("collect"),
    )
    monkeypatch.setattr(garbage, "gc", fake)
    monkeypatch.setattr(garbage, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return SimpleNamespace(garbage=garbage.Garbage(), calls=calls, clock=clock, held=held)


def test_it_waits_until_little_is_there(made):
    assert made.calls[0] == "freeze" and len(made.calls) == 2
    made.held[:] = [None] * 30_001
    made.garbage.tend()
    assert made.calls[2:] == []
    made.held.clear()
    made.garbage.tend()
    assert made.calls[2:] == [], "it has just looked"
    made.clock.now += 1
    made.garbage.tend()
    assert made.calls[2:] == ["collect"]
    made.clock.now += 9
    made.garbage.tend()
    assert made.calls[2:] == ["collect"], "it rests"
    made.clock.now += 1
    made.garbage.tend()
    assert made.calls[2:] == ["collect"] * 2


def test_cycles_go(monkeypatch):
    """With the real collector, whose settings are those of the tests afterwards."""

    class Held:
        pass

    before, ended = gc.get_threshold(), []
    try:
        keeper = garbage.Garbage()
        one = Held()
        one.itself = one
        monkeypatch.setattr(Held, "__del__", lambda self: ended.append(self), raising=False)
        gc.disable()
        del one
        monkeypatch.setattr(garbage, "_FEW", 10**9)
        keeper.tend()
        assert len(ended) == 1
    finally:
        gc.enable()
        gc.unfreeze()
        gc.set_threshold(*before)
