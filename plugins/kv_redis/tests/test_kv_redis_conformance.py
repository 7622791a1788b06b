"""The tier does what the kit asks of tiers."""

from __future__ import annotations

import pytest
from kv_redis_server import start_server  # noqa: F401
from toolkit_lm_devkit import KVTierConformance
from toolkit_lm_kv_redis import Options
from toolkit_lm_kv_redis.store import RedisStore
from toolkit_lm_kv_redis.tier import RedisTier


class TestRedis(KVTierConformance):
    store = RedisStore
    tier = RedisTier

    @pytest.fixture(autouse=True)
    def server(self, start_server, monkeypatch):  # noqa: F811
        monkeypatch.setattr(type(self), "options", Options(url=start_server().url))


class TestEncrypted(TestRedis):
    @pytest.fixture(autouse=True)
    def server(self, start_server, monkeypatch, tmp_path):  # noqa: F811
        (tmp_path / "key").write_bytes(bytes(range(32)))
        (tmp_path / "key").chmod(0o600)
        options = Options(url=start_server().url, key_file=str(tmp_path / "key"))
        monkeypatch.setattr(type(self), "options", options)
