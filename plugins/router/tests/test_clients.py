"""Keys of a file: who may ask for what, how often, and what the router does not count."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_router.asking import read
from toolkit_lm_router.clients import RouterKeys
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.prefixes import Hasher
from toolkit_lm_server import reloading
from toolkit_lm_server.limits.key_limits import ApiKey
from toolkit_lm_server.options import HttpOptions, ServerOptions

pytestmark = pytest.mark.anyio
KEYS = [
    {"name": "all", "key": "all"},
    {"name": "his", "key": "his", "models": ["m"], "adapters": ["his*"]},
    {"name": "none", "key": "none", "adapters": []},
    {"name": "slow", "key": "slow", "requests_per_minute": 1},
]
BY_MODEL = {"his": {"m", "his-1"}, "none": {"m", "other"}}
"""The models that the keys may use, of those of the stub."""
NAMES = ("m", "other", "his-1", "hers")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys.yaml"
    path.write_text(json.dumps({"keys": KEYS}))
    return path


@pytest.fixture
def backend(make_stub):
    """Two models and two adapters."""
    stub = make_stub(NAMES)
    stub.parents = {"his-1": "m", "hers": "m"}
    return stub


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_each_key_has_its_models_and_adapters(make_routing, backend, file):
    async with make_routing(backend, api_keys_file=str(file)) as routed:
        assert (await routed.post(prompt="a"))[0] == 401
        assert (await routed.post(prompt="a", headers=bearer("no")))[0] == 401
        assert (await routed.post(prompt="a", headers=bearer("all")))[0] == 200
        for key, allowed in BY_MODEL.items():
            _, listed = await routed.get("/v1/models", bearer(key))
            assert {card["id"] for card in json.loads(listed)["data"]} == allowed
            absent = await routed.post(model="absent", prompt="a", headers=bearer(key))
            for name in NAMES:
                status, answer = await routed.post(model=name, prompt="a", headers=bearer(key))
                assert status == (200 if name in allowed else 404), (key, name)
                if name not in allowed:
                    # Another's is as one that there is not.
                    text = answer.decode()
                    assert json.loads(text)["error"]["code"] == "model_not_found"
                    assert text.partition("?")[0].count(name) == 1
                    assert not any(f"'{o}'" in text for o in {*NAMES} - allowed - {name}), text
            assert absent[0] == 404
            # The backend would take a model of its own.
            assert (await routed.post(prompt="a", headers=bearer(key)))[0] == 404
            form = {**bearer(key), "Content-Type": "multipart/form-data; boundary=x"}
            assert (await routed.post(model="m", headers=form))[0] == 404


@pytest.mark.parametrize("field", ["adapter", "lora_path", "lora"])
async def test_an_adapter_beside_the_model_is_checked(make_routing, backend, file, field):
    async with make_routing(backend, api_keys_file=str(file)) as routed:

        async def ask(key: str, value: object) -> int:
            body = {"model": "m", "prompt": "a", field: value}
            return (await routed.post(headers=bearer(key), **body))[0]

        assert await ask("his", "his-1") == 200
        assert await ask("his", "hers") == 404
        assert await ask("none", "his-1") == 404
        assert await ask("all", "hers") == 200
        assert await ask("his", [{"id": 0, "scale": 1}]) == 404
        assert await ask("his", None) == 200


async def test_requests_per_minute(make_routing, backend, file):
    async with make_routing(backend, api_keys_file=str(file)) as routed:
        assert (await routed.post(prompt="a", headers=bearer("slow")))[0] == 200
        status, answer = await routed.post(prompt="a", headers=bearer("slow"))
        assert status == 429
        assert b"requests_per_minute" in answer
        assert (await routed.post(prompt="a", headers=bearer("all")))[0] == 200


@pytest.mark.parametrize("name", ["tokens_per_minute", "max_sequences"])
def test_what_the_router_does_not_count_is_refused(name, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(json.dumps({"keys": [{"name": "a", "key": "b", name: 5}]}))
    options = RouterOptions(backend=["http://127.0.0.1:9"], api_keys_file=str(file))
    with pytest.raises(ConfigError, match=f"the key 'a' has {name}, which a router does not"):
        RouterKeys.of(options.server)


def test_each_limit_of_a_key_is_obeyed_or_refused():
    """One that is new needs a place here."""
    obeyed = {"name", "key", "models", "adapters", "requests_per_minute"}
    assert {*ApiKey.__struct_fields__} == obeyed | {"tokens_per_minute", "max_sequences"}


async def test_the_file_is_read_again(make_routing, backend, file, monkeypatch):
    monkeypatch.setattr(reloading.Reloading.__init__, "__defaults__", (0.05,))
    async with make_routing(backend, api_keys_file=str(file)) as routed:

        async def status(key: str) -> int:
            return (await routed.post(prompt="a", headers=bearer(key)))[0]

        async def put(keys: list[dict[str, object]]) -> None:
            made = file.with_suffix(".new")
            made.write_text(json.dumps({"keys": keys}))
            os.replace(made, file)

        assert (await status("all"), await status("new")) == (200, 401)
        await put([{"name": "new", "key": "new"}])
        while await status("new") != 200:
            await asyncio.sleep(0.02)
        assert await status("all") == 401
        assert (await routed.get("/v1/models", bearer("all")))[0] == 401
        # One with a fault changes nothing.
        await put([{"name": "all", "key": "all", "max_sequences": 1}])
        await asyncio.sleep(0.3)
        assert (await status("all"), await status("new")) == (401, 200)


def test_the_options_of_listening_are_the_servers():
    """They stand once."""
    own = {name: value for name, value in vars(RouterOptions).items() if name == "__annotations__"}
    repeated = {*own["__annotations__"]} & {*ServerOptions.__struct_fields__}
    assert repeated == {"port", "shutdown_timeout"}
    assert {*HttpOptions.__struct_fields__} <= {*RouterOptions.__struct_fields__}


@pytest.mark.parametrize("body", [b"{}", b"[1]", b"", b'{"adapter": {"a": [1]}}', b'{"lora": 1.5}'])
def test_odd_bodies_are_read(body):
    asked = read("/v1/completions", body, {"content-type": "application/json"}, Hasher())
    assert all(value is None for value in asked.adapters.values())
