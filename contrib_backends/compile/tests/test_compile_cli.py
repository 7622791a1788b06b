"""The commands `toolkit cache ...`, over a store that was made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_cli.app import run
from toolkit_lm_compile.store import Entry, Manifest, open_root


def test_pruning_keeps_the_lock_that_others_wait_for(tmp_path):
    entry = Entry(open_root(tmp_path / "c"), "key", "rank_0_0")
    with entry.locked(), entry.staged() as folder:
        entry.publish(folder, Manifest(model="m", ingredients={}, sources={}, plans=[]))
    lock = entry.parent / ".rank_0_0.lock"
    before = lock.stat().st_ino
    assert run(["cache", "prune", "--cache-dir", str(tmp_path / "c")]) == 0
    assert not entry.folder.exists() and lock.stat().st_ino == before


@pytest.mark.parametrize("place", ["/proc/nowhere/compile", "/proc/self"])
def test_a_folder_that_cannot_be_made_or_written_is_named(place):
    with pytest.raises(ConfigError, match=r"cannot be (made|written).*cache_dir.*--no-compile-cache"):
        open_root(Path(place))
