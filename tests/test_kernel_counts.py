"""`benchmarks/kernel_counts.py`: a slower kernel is found, and all kernels are among the cases."""

from __future__ import annotations

import ast
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PACKAGE = ROOT / "contrib_backends" / "cpu" / "src" / "toolkit_lm_cpu"
LIBRARY = PACKAGE / "_kernels.abi3.so"
NO_KERNELS = {
    "supports",
    "set_threads",
    "bind_threads",
    "in_huge_pages",
    "lose",
    "layer",
    "low_rank",
    "low_ranks",
    "row_groups",
    "group",
}
"""They compute nothing."""
LEFT_OUT = {"run_layer"}
"""It is made of other cases."""


@pytest.fixture(scope="module")
def benchmarks():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def counts(benchmarks):
    return benchmarks("kernel_counts")


def functions_of_the_kernels() -> set[str]:
    tree = ast.parse((PACKAGE / "_kernels.pyi").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


RUN = """
import json, sys

sys.path.insert(0, sys.argv[1])
import kernel_cases

class Seen:
    def __init__(self, kernels):
        self.kernels, self.names = kernels, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.kernels, name)

kernels = Seen(kernel_cases.load(sys.argv[2]))
names = []
for name, case in kernel_cases.Cases(kernels):
    assert case() is None
    names.append(name)
print(json.dumps([names, sorted(kernels.names)]))
"""
"""Runs every case, and prints the cases' names and those of the kernels that were called."""


def test_each_kernel_is_a_case():
    """In a process of its own: a library that is loaded twice has its memory set up twice."""
    command = [sys.executable, "-c", RUN, str(BENCHMARKS), str(LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    names, called = json.loads(done.stdout)
    assert len(names) == len(set(names))
    assert functions_of_the_kernels() - NO_KERNELS - {*called} == LEFT_OUT


@pytest.mark.nightly
def test_a_slower_kernel_is_found(counts, tmp_path):
    """A norm with an added loop, among the cases whose names have "norm" or "rope". At night, since
    it compiles all kernels: `make test-kernel-counts` counts and compares by day."""
    try:
        collector = None if counts.has_counter() else counts.compile_collector(tmp_path)
    except counts.LeftOutError as error:
        pytest.skip(str(error))
    kernels = tmp_path / counts.KERNELS
    shutil.copytree(PACKAGE / "kernels", kernels)
    shutil.copy(ROOT / counts.COMPILE, tmp_path / counts.COMPILE)
    source = kernels / "layer_ops.h"
    start = "TARGET static void NAME(norm)(void *job, long item) {\n"
    loop = "    for (volatile int i = 0; i < 100000; i++);\n"
    text = source.read_text()
    assert text.count(start) == 1
    source.write_text(text.replace(start, start + loop))
    planted = counts.compile_kernels(tmp_path, tmp_path / "planted.so")
    before, again, slower = (
        counts.count(library, ROOT / counts.CASES, "norm,rope", collector)
        for library in (LIBRARY, LIBRARY, planted)
    )
    assert all(again[name] == pytest.approx(before[name], rel=0.005) for name in before)
    assert not list(counts.dearer(before, again, []))
    found = {line.split(": ")[0] for line in counts.dearer(before, slower, [])}
    assert found == {name for name in before if "norm" in name} != set()
    assert not list(counts.dearer(before, slower, ["norm: it loops"]))


def test_what_is_cheaper_or_new_is_no_fault(counts):
    before = {"a": 100, "b": 100, "c": 100}
    now = {"a": 103, "b": 50, "d": 1000}
    assert not list(counts.dearer(before, now, []))
    assert list(counts.dearer(before, now | {"a": 104}, [])) == [
        "a: 104 instructions, +4.0%, over 3%"
    ]


def test_where_nothing_can_be_compared_it_says_why(tmp_path):
    copy = tmp_path / "benchmarks"
    copy.mkdir()
    for file in BENCHMARKS.glob("kernel_*.py"):
        shutil.copy(file, copy)
    done = subprocess.run(
        [sys.executable, copy / "kernel_counts.py"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "are not compared: git status" in done.stdout
