"""Both tiers do what the kit asks of tiers."""

from __future__ import annotations

import pytest
from toolkit_lm_devkit import KVTierConformance
from toolkit_lm_kv_disk import Options
from toolkit_lm_kv_disk.host import HostBlocks
from toolkit_lm_kv_disk.segments import number_of
from toolkit_lm_kv_disk.store import DiskStore
from toolkit_lm_kv_disk.tier import DiskTier, HostTier


class TestHost(KVTierConformance):
    store = HostBlocks
    tier = HostTier
    options = Options(host="4kB")
    name = "kv_host"

    @pytest.fixture
    def engine_options(self):
        return {"plugin_option": {"kv_disk": {"host": "4MiB", "loads": "always"}}}


class TestDisk(KVTierConformance):
    store = DiskStore
    tier = DiskTier
    name = "kv_disk"
    outlives = True
    damages = True

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        self.place = tmp_path / "kv"
        monkeypatch.setattr(type(self), "options", Options(dir=str(self.place), disk="64kB"))

    @pytest.fixture
    def engine_options(self):
        return {"plugin_option": {"kv_disk": {"dir": str(self.place), "loads": "always"}}}

    def damage(self):
        """Every byte from the middle of the first record on is another one."""
        for path in (path for path in self.place.rglob("*.kv") if number_of(path) >= 0):
            data = bytearray(path.read_bytes())
            data[200:] = bytes(byte ^ 1 for byte in data[200:])
            path.write_bytes(data)
