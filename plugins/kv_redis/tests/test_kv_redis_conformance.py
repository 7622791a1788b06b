"""The tier does what the kit asks of tiers."""

from __future__ import annotations

import time

import pytest
from kv_redis_server import start_server  # noqa: F401
from toolkit_lm_devkit import KVTierConformance
from toolkit_lm_kv_redis import Options
from toolkit_lm_kv_redis.store import RedisStore
from toolkit_lm_kv_redis.tier import RedisTier


class TestRedis(KVTierConformance):
    store = RedisStore
    tier = RedisTier
    name = "kv_redis"
    outlives = True
    damages = True

    @pytest.fixture(autouse=True)
    def server(self, start_server, monkeypatch, tmp_path):  # noqa: F811
        self.redis = start_server()
        self.given = {"url": self.redis.url, **self.more(tmp_path)}
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(type(self), "options", Options(**self.given))

    def more(self, tmp_path):
        return {}

    @pytest.fixture
    def engine_options(self):
        return {"plugin_option": {"kv_redis": {"loads": "always", **self.given}}}

    def settle(self, llm):
        store = llm.engine.client.core.executor.runner._transfers._stores["kv_redis"]
        until = time.monotonic() + 30
        while store._pending:
            assert time.monotonic() < until
            time.sleep(0.01)

    def damage(self):
        client = self.redis.client
        for key in client.keys("toolkit-lm:*"):
            client.setrange(key, client.strlen(key) - 8, b"damaged.")


class TestEncrypted(TestRedis):
    def more(self, tmp_path):
        (tmp_path / "key").write_bytes(bytes(range(32)))
        (tmp_path / "key").chmod(0o600)
        return {"key_file": str(tmp_path / "key")}
