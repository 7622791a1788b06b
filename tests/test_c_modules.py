"""Modules in C that one library makes for all versions of Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path
    for path in ROOT.glob("*/*/src/**/*.c")
    if re.search(r"#define Py_LIMITED_API", path.read_text())
)
TAKEN = "#undef Py_RETURN_NONE\n#define Py_RETURN_NONE return Py_NewRef(Py_None)\n"


def test_modules_are_found():
    assert {path.parts[-4] for path in MODULES} == {"src"}
    assert {path.parts[-5] for path in MODULES} == {"cpu", "executor_mp"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.parts[-5])
def test_what_is_returned_is_referred_to_whichever_headers_build_it(module):
    """Headers of Python 3.12 and later return None, True and False without a reference; Python 3.11
    counts references of these."""
    text = module.read_text()
    assert text.index("#include <Python.h>") < text.index(TAKEN) < text.index("Py_RETURN_NONE;")
    rooms = "".join(path.read_text() for path in module.parent.glob("*.[ch]"))
    assert not re.search(r"Py_RETURN_(TRUE|FALSE|NOTIMPLEMENTED)", rooms)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="None is not counted")
def test_a_call_that_returns_none_does_not_take_its_reference():
    kernels = pytest.importorskip("toolkit_lm_cpu._kernels")
    calls = 1000
    before = sys.getrefcount(None)
    for _ in range(calls):
        kernels.set_threads(1)
    assert abs(sys.getrefcount(None) - before) < calls / 2
