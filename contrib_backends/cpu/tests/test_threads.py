"""Cores on which the kernels' threads run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from toolkit_lm_cpu.library import on_core

CORES = sorted(os.sched_getaffinity(0))
SCRIPT = """
import json, os, sys, threading
from types import SimpleNamespace
import torch
from toolkit_lm_cpu import layers, library
from toolkit_lm_cpu.panels import linear, pack

options = json.loads(sys.argv[1])
torch.set_num_threads(options.get("threads", len(os.sched_getaffinity(0))))
library.granted_cores = lambda: options.get("quota")
layers._LARGE = options.get("large", 0)
engine = SimpleNamespace(overlap=options.get("overlap", False))
parallel = SimpleNamespace(tensor_parallel_size=options.get("ranks", 1), pipeline_parallel_size=1)
kernels = layers.CpuKernels(SimpleNamespace(engine=engine, parallel=parallel))
weight = torch.ones(2048, 256)
packed = pack(weight, library.usable_types()[torch.float32], kernels._arena)

def cores():
    return {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

begin = threading.Event()

def in_a_step():
    begin.wait()
    with kernels.step(512):
        print(json.dumps(sorted(os.sched_getaffinity(0))))

other = threading.Thread(target=in_a_step)
if options.get("others"):
    other.start()
with kernels.step(512):
    if "then" in options:
        library._kernels.set_threads(options["then"])
    if options.get("others"):
        begin.set()
        other.join()
    for _ in range(50):
        x = torch.ones(512, 256)
        y = linear(library.usable_types()[torch.float32], x, packed, 2048, None, 0, False, None)
        assert (y == 256).all()
    inside = cores()
print(json.dumps([str(os.getpid()), inside, cores()]))
"""


def cores_of_threads(**options: object) -> tuple[list[int], list[list[int]], list[int]]:
    """The cores of the computing thread in a step, of those that are bound beside it, and of the
    computing thread after the step."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    main, inside, after = json.loads(done.stdout)
    return inside.pop(main), [cores for cores in inside.values() if cores != CORES], after[main]


pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="the process may use one core only")


def test_each_thread_has_a_core():
    main, members, after = cores_of_threads()
    assert main == CORES[:1] and sorted(members) == [[core] for core in CORES[1:]]
    assert after == CORES


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"overlap": True}, id="overlap"),
        pytest.param({"ranks": 2}, id="ranks"),
        pytest.param({"quota": 1.5}, id="quota"),
        pytest.param({"threads": 1}, id="fewer threads"),
        pytest.param({"large": 2**30}, id="small model"),
    ],
)
def test_elsewhere_none_is_bound(options):
    assert cores_of_threads(**options) == (CORES, [], CORES)


def test_of_two_threads_that_compute_one_is_bound():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"others": True})],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert json.loads(done.stdout.splitlines()[0]) == CORES, done.stderr


def test_threads_that_come_later_run_anywhere():
    """They are started from the core of the computing thread. Those that were bound before may
    stay."""
    main, members, after = cores_of_threads(then=len(CORES) + 2)
    assert (main, after) == (CORES[:1], CORES)
    assert CORES[:1] not in members and len(members) < len(CORES)


def test_a_core_that_is_gone_stops_nobody():
    with on_core(1023):
        assert sorted(os.sched_getaffinity(0)) == CORES
    with on_core(CORES[1]):
        assert os.sched_getaffinity(0) == {CORES[1]}
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_a_core_for_each_thread_is_needed():
    script = (
        "from toolkit_lm_cpu import _kernels\n_kernels.set_threads(2)\n_kernels.bind_threads(%s)"
    )
    for cores, what in (
        ("(0,)", "one core for each thread"),
        ("(0, -1)", "core -1"),
        ("[0, 1]", "one core for each thread"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", script % cores],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert f"ValueError: {'a tuple of ' if 'one core' in what else ''}{what}" in done.stderr
