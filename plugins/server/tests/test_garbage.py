"""Full garbage collections come when they are short."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import SimpleNamespace

import pytest
from toolkit_lm_server import garbage


@pytest.fixture
def made(monkeypatch):
    calls = []
    clock = SimpleNamespace(now=100.0)
    held = []
    fake = SimpleNamespace(
        freeze=lambda: calls.append("freeze"),
        set_threshold=lambda *sizes: calls.append(sizes),
        get_objects=lambda generation: held if generation == 2 else None,
        collect=lambda: calls.append("collect"),
    )
    monkeypatch.setattr(garbage, "gc", fake)
    monkeypatch.setattr(garbage, "time", SimpleNamespace(monotonic=lambda: clock.now))
    memory = SimpleNamespace(resident=1000)
    monkeypatch.setattr(garbage, "resident_bytes", lambda: memory.resident)
    monkeypatch.setattr(garbage, "_trim", lambda: lambda padding: calls.append("trim"))
    return SimpleNamespace(
        garbage=garbage.Garbage(), calls=calls, clock=clock, held=held, memory=memory
    )


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


def test_memory_is_given_back_where_there_is_more_and_nobody_waits(made):
    tend = made.garbage.tend
    seen = []
    for resident, is_idle in (
        (1049, True),
        (1051, False),
        (1051, True),
        (1051, True),
        (1200, True),
    ):
        made.memory.resident = resident
        made.clock.now += 10
        tend(is_idle=is_idle)
        seen.append(made.calls.count("trim"))
    assert seen == [0, 0, 1, 1, 2]


def test_the_c_library_gives_back_what_threads_have_freed():
    code = """
import threading
from toolkit_lm_server.garbage import _trim, resident_bytes
first = resident_bytes()
def work():
    pieces = [bytes(2000) for _ in range(100_000)]
    keep.append(bytes(100))
keep = []
threads = [threading.Thread(target=work) for _ in range(2)]
[one.start() for one in threads], [one.join() for one in threads]
held = resident_bytes()
_trim()(0)
print(held - first, resident_bytes() - first)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    held, kept = map(int, done.stdout.split())
    assert kept < 2**25 and (held < 2**25 or kept < held / 2)


def test_cycles_go(monkeypatch):
    """With the real collector, whose settings are those of the tests afterwards."""

    class Held:
        pass

    before = gc.get_threshold()
    ended = []
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
        gc.set_threshold(*before)


MAKING = """
import gc, sys, threading
from toolkit_lm_server.garbage import _num_old

sys.setswitchinterval(1e-5)
end = threading.Event()
wrong = []

def make():
    while not end.is_set():
        try:
            tuple([] for _ in range(300))
        except SystemError as error:
            wrong.append(error)

threads = [threading.Thread(target=make) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(300):
    # Tuples that are being made become old.
    gc.collect()
    assert _num_old() > 100
end.set()
for thread in threads:
    thread.join()
print(wrong)
"""


def test_the_count_leaves_tuples_alone_that_others_make():
    done = subprocess.run(
        [sys.executable, "-c", MAKING], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
