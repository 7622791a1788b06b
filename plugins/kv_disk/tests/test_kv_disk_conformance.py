"""Both tiers do what the kit asks of tiers."""

from __future__ import annotations

import pytest
from toolkit_lm_devkit import KVTierConformance
from toolkit_lm_kv_disk import Options
from toolkit_lm_kv_disk.host import HostBlocks
from toolkit_lm_kv_disk.store import DiskStore
from toolkit_lm_kv_disk.tier import DiskTier, HostTier


class TestHost(KVTierConformance):
    store = HostBlocks
    tier = HostTier
    options = Options(host="4kB")


class TestDisk(KVTierConformance):
    store = DiskStore
    tier = DiskTier

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(type(self), "options", Options(dir=str(tmp_path / "kv"), disk="64kB"))
