"""Shorter starts."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
from toolkit_lm.engine.start_up import no_garbage_collection

ENGINE = """
import sys, torch
by_torch = set(sys.modules)
from toolkit_lm.engine.process.loop import serve
print("\\n".join(sys.modules.keys() - by_torch))
"""
HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "transformers",
    "tokenizers",
    "fastapi",
    "pydantic",
    "httpx",
    "PIL",
    "jinja2",
    "triton",
)
"""Packages that an engine process needs for few models, or never: a second or more of each
start."""
MOST = 220
"""Modules, core's among them, that an engine process imports beside torch's, before it knows its
model. They were 194."""


def test_an_engine_process_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ENGINE], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert "toolkit_lm.engine.core" in modules
    assert [
        name
        for name in modules
        if name.startswith(tuple(f"{package}." for package in HEAVY)) or name in HEAVY
    ] == []
    assert len(modules) <= MOST


@pytest.fixture(autouse=True)
def counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own count of what is frozen, which the root's conftest.py keeps."""
    counts = getattr(gc.get_freeze_count, "__wrapped__", gc.get_freeze_count)
    monkeypatch.setattr(gc, "get_freeze_count", counts)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    frozen_by_python = gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="within"), no_garbage_collection():
            assert not gc.isenabled()
            raise ValueError("within")
        assert gc.isenabled() == enabled
        # Frozen objects may end meanwhile.
        assert gc.get_freeze_count() <= frozen_by_python
    finally:
        (gc.enable if was_enabled else gc.disable)()


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """Without what the root's conftest.py has frozen."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_made_meanwhile_is_not_looked_at_when_it_ends() -> None:
    before = gc.get_stats()
    with no_garbage_collection():
        made: list[list[int]] = [[] for _ in range(100_000)]
    more: list[list[int]] = [[] for _ in range(10)]
    assert [one["collections"] for one in gc.get_stats()] == [one["collections"] for one in before]
    assert len(made) + len(more) == 100_010


def test_what_the_host_has_frozen_stays_frozen() -> None:
    gc.freeze()
    with no_garbage_collection():
        pass
    assert gc.get_freeze_count() > 0
