"""No test depends on the machine's load: none fails because something took a few seconds.

A bound of seconds on the wall is there against what hangs, and is far from what a test takes. What
is to be fast is held to the time of processors, or to a count of what is done. Where something is
to take its time, the clock starts before what it counts from: the server's begins as it accepts.
"""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from ports import free_port, is_free
from processes import living, wait_until_gone

ROOT = Path(__file__).parents[1]
FOLDERS = ("core/tests", "libs/*/tests", "plugins/*/tests", "contrib_*/*/tests", "tests")
FILES = sorted(file for one in FOLDERS for place in ROOT.glob(one) for file in place.rglob("*.py"))
LEAST = 8
"""Seconds: what takes one or two alone is over by then on a machine with twice as much to do."""
CLOCKS = ("time.monotonic()", "time.perf_counter()", "time.time()")
WAITS = ("wait", "wait_for", "wait_procs", "until", "join", "result", "communicate", "acquire")
"""Calls whose last argument is how long they wait."""


def hasty(source: str) -> Iterator[int]:
    """Lines with fewer seconds than LEAST: on an age, of a deadline, or of a call that waits."""
    tree = ast.parse(source)
    numbers = {
        ast.unparse(one.targets[0]): one.value.value
        for one in tree.body
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
    }
    # It asks again.
    looks = {
        id(one)
        for loop in ast.walk(tree)
        if isinstance(loop, ast.While)
        for one in ast.walk(loop.test)
    }

    def is_short(bound: ast.expr) -> bool:
        known = bound.value if isinstance(bound, ast.Constant) else numbers.get(ast.unparse(bound))
        return isinstance(known, int | float) and 0 < known < LEAST

    for node in ast.walk(tree):
        match node:
            case ast.Compare(ops=[*_, ast.Lt() | ast.LtE()], comparators=[*_, bound]):
                given = [bound] if any(clock in ast.unparse(node) for clock in CLOCKS) else []
            case ast.Assign(value=ast.BinOp(left=clock, op=ast.Add(), right=bound)):
                given = [bound] if ast.unparse(clock) in CLOCKS else []
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in WAITS:
                named = [one.value for one in node.keywords if one.arg in ("timeout", "seconds")]
                given = [] if id(node) in looks else [*node.args[-1:], *named]
            case _:
                given = []
        if any(map(is_short, given)):
            yield node.lineno


def test_bounds_on_the_wall_are_far_from_what_a_test_takes():
    found = {file.relative_to(ROOT): list(hasty(file.read_text())) for file in FILES}
    assert {str(file): lines for file, lines in found.items() if lines} == {}, (
        f"these lines bound the wall to less than {LEAST} seconds: wait for what must come about, "
        "measure the time of processors (time.process_time), or allow more"
    )
    assert len(found) > 300


@pytest.mark.parametrize("client", [httpx.Client, httpx.AsyncClient])
def test_clients_wait_for_a_busy_machine(client):
    """Where a test states no time, httpx would wait for 5 seconds."""
    found = client().timeout
    assert min(found.connect, found.read, found.write, found.pool) >= LEAST


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - start < {}",
        "SOON = {}; assert 0.5 < time.perf_counter() - start <= SOON",
        "end = time.monotonic() + {}",
        "wait_for(server.is_idle, {})",
        "_, alive = psutil.wait_procs(found, timeout={})",
        "future.result({}.5)",
    ],
)
def test_a_hasty_bound_is_found(line):
    assert list(hasty(line.format(5))) == [1]
    assert list(hasty(line.format(30))) == []


def late_starts(source: str) -> Iterator[int]:
    """Lines that start a clock after a connection, where an age by it has a least value."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for function in functions:
        nodes = list(ast.walk(function))
        connects = [
            node.lineno
            for node in nodes
            if isinstance(node, ast.Call) and "connect" in ast.unparse(node.func)
        ]
        ages = [
            age
            for node in nodes
            if isinstance(node, ast.Compare)
            for age in least_ages(node)
            if isinstance(age, ast.BinOp) and ast.unparse(age.left) in CLOCKS
        ]
        starts = {ast.unparse(age.right) for age in ages}
        for node in nodes:
            is_start = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in starts
            if is_start and any(line < node.lineno for line in connects):
                yield node.lineno


def least_ages(compared: ast.Compare) -> Iterator[ast.expr]:
    """The sides of a comparison that something is less than."""
    sides = [compared.left, *compared.comparators]
    for left, operator, right in zip(sides, compared.ops, sides[1:], strict=False):
        if isinstance(operator, ast.Lt | ast.LtE):
            yield right
        elif isinstance(operator, ast.Gt | ast.GtE):
            yield left


def test_clocks_start_before_what_they_count_from():
    found = {file.relative_to(ROOT): list(late_starts(file.read_text())) for file in FILES}
    assert {str(file): lines for file, lines in found.items() if lines} == {}, (
        "on a busy machine the other side's clock has run for a while: start it before connecting"
    )


@pytest.mark.parametrize("least", ["0.5 < {} < 8", "{} > 0.5", "0.5 <= {}"])
def test_a_late_start_is_found(least):
    asserted = "    assert " + least.format("time.monotonic() - start")
    lines = ["    start = time.monotonic()", "    one = connect(port)"]
    for first, found in ((lines, []), (lines[::-1], [3])):
        assert list(late_starts("\n".join(["def test():", *first, asserted]))) == found
    bound = "    assert time.monotonic() - start < 8"
    assert list(late_starts("\n".join(["def test():", *lines[::-1], bound]))) == []


def looks_at_processes(source: str) -> Iterator[int]:
    """Lines that ask psutil whether a process lives: it may end between two questions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("STATUS_ZOMBIE", "pid_exists"):
            yield node.lineno


def test_a_process_that_ends_while_it_is_looked_at_is_no_error():
    found = {
        file.relative_to(ROOT): list(looks_at_processes(file.read_text()))
        for file in FILES
        if file != ROOT / "tests/processes.py"
    }
    assert {str(file): lines for file, lines in found.items() if lines} == {}, (
        "use is_alive, living or wait_until_gone of tests/processes.py"
    )


def test_a_look_at_a_process_is_found():
    line = "psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE"
    assert list(looks_at_processes(line)) == [1, 1]


def probed_ports(source: str) -> Iterator[int]:
    """Lines that let the kernel choose a port and give it back: another may have it by its use."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.With) and "socket()" in ast.unparse(node.items[0]):
            calls = [ast.unparse(one) for one in ast.walk(node) if isinstance(one, ast.Call)]
            is_chosen = any(".bind((" in call and call.endswith(", 0))") for call in calls)
            if is_chosen and not any(call.endswith(".listen()") for call in calls):
                yield node.lineno


def test_a_port_is_free_until_it_is_used():
    found = {file.relative_to(ROOT): list(probed_ports(file.read_text())) for file in FILES}
    assert {str(file): lines for file, lines in found.items() if lines} == {}, (
        "use free_port of tests/ports.py, or keep the socket"
    )


def test_a_probed_port_is_found():
    probe = """
with socket.socket() as free:
    free.bind((host, 0))
    {}port = free.getsockname()[1]"""
    assert list(probed_ports(probe.format(""))) == [2]
    assert list(probed_ports(probe.format("free.listen(); "))) == []


def test_no_port_is_given_twice():
    firsts = [free_port(count=2) for _ in range(50)]
    ports = {port + number for port in firsts for number in range(2)}
    assert len(ports) == 100 and max(ports) < 32768
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        assert not is_free("127.0.0.1", taken.getsockname()[1])


THAWS = ROOT / "core/tests/engine/test_start_up.py"
"""It freezes again."""


def test_what_was_collected_stays_frozen():
    """Else each full collection of garbage of later tests takes seconds."""
    calls = "gc.{}freeze()".format("un")
    found = [str(file) for file in FILES if file != THAWS and calls in file.read_text()]
    assert found == []
    assert calls in THAWS.read_text()


def test_a_process_that_has_ended_is_not_alive():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        seen = psutil.Process(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert living([seen, process.pid, os.getpid()]) == [os.getpid()]
    # It is gone.
    assert living([seen, process.pid]) == []
    wait_until_gone(seen, process.pid)
    with pytest.raises(AssertionError, match=f"alive still: .{os.getpid()}"):
        wait_until_gone(os.getpid(), seconds=0)
