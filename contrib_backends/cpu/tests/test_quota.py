"""CPU quotas of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest
from toolkit_lm_cpu import library
from toolkit_lm_cpu.quota import granted_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_least_of_the_groups_around_a_process(tmp_path) -> None:
    own = tmp_path / "own"
    root = tmp_path / "cgroup"
    write(own, "0::/outer/inner\n")
    assert granted_cores(root, own) is None
    write(root / "cpu.max", "max 100000\n")
    write(root / "outer" / "cpu.max", "150000 100000\n")
    assert granted_cores(root, own) == 1.5
    write(root / "outer" / "inner" / "cpu.max", "400000 100000\n")
    assert granted_cores(root, own) == 1.5
    write(root / "outer" / "inner" / "cpu.max", "50000 100000\n")
    assert granted_cores(root, own) == 0.5


def test_the_older_layout(tmp_path) -> None:
    own = tmp_path / "own"
    root = tmp_path / "cgroup"
    write(own, "5:memory:/job\n4:cpu,cpuacct:/job\n")
    write(root / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "250000\n")
    write(root / "cpu,cpuacct" / "job" / "cpu.cfs_period_us", "100000\n")
    assert granted_cores(root, own) == 2.5
    write(root / "cpu,cpuacct" / "job" / "cpu.cfs_quota_us", "-1\n")
    assert granted_cores(root, own) is None


@pytest.mark.parametrize("text", ["", "nonsense", "max"])
def test_what_cannot_be_read_grants_all(tmp_path, text) -> None:
    own = tmp_path / "own"
    root = tmp_path / "cgroup"
    assert granted_cores(root, own) is None
    write(own, "0::/\n")
    write(root / "cpu.max", text)
    assert granted_cores(root, own) is None


@pytest.mark.skipif(library.refusal() is not None, reason=str(library.refusal()))
@pytest.mark.parametrize(("granted", "threads"), [(None, 6), (0.5, 1), (1.5, 2), (64, 6)])
def test_threads_are_as_many_as_may_run(monkeypatch, granted, threads) -> None:
    given = []
    monkeypatch.setattr(library, "granted_cores", lambda: granted)
    monkeypatch.setattr(library.torch, "get_num_threads", lambda: 6)
    monkeypatch.setattr(library, "_kernels", type("Kernels", (), {"set_threads": given.append}))
    library.use_threads()
    assert given == [threads]
