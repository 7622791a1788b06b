"""An engine that is its own peer does what the kit asks of engines with a tier. The halves alone do
nothing: requests say what is offered and fetched."""

from __future__ import annotations

import json

import pytest
from ports import free_port
from toolkit_lm_devkit.kv_tier_engine import KVTierInEngine
from toolkit_lm_kv_transfer.share import ARRAY
from toolkit_lm_kv_transfer.store import TransferStore


class TestTransfer(KVTierInEngine):
    store = TransferStore
    name = "kv_transfer"

    @pytest.fixture
    def engine_options(self, monkeypatch, tmp_path):
        monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", "a secret of sixteen characters")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        own = f"127.0.0.1:{free_port()}"
        return {"plugin_option": {"kv_transfer": {"listen": own, "peers": [own], "timeout": 20}}}

    def request(self, last):
        if last is None:
            return {"kv_transfer_params": {"do_remote_decode": True}}
        if (params := last.outputs[0].arrays.get(ARRAY)) is None:
            return {}
        return {"kv_transfer_params": json.loads(params.tobytes())}

    def settle(self, llm):
        """Runs the steps in which the rest is offered."""
        core = llm.engine.client.core
        for _ in range(20):
            if not core.has_unfinished:
                return
            core.step()
        raise AssertionError("the engine never rests")
