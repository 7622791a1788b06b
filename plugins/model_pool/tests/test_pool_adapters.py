"""Adapters as models of a pool: keys that are limited to one, and adapters that come and go while
the server runs."""

from __future__ import annotations

import pytest
from pool_server import ADAPTERS, SMALL, save_adapters, served, write_models

ALL = {"Authorization": "Bearer all"}
LIMITED = {"Authorization": "Bearer limited"}
BODY = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
NAMES = ("tuned", *ADAPTERS)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """A server of a model with two adapters in its entry, and a folder for more; and another model.
    A key is limited to the name of an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    listed = save_adapters(folder)
    root = folder / "more"
    root.mkdir()
    plugins = {"lora": {"folder": str(root)}}
    options = {**SMALL, "plugin_option": plugins, "routes": ["llama_cpp"]}
    path = write_models(
        folder / "models.yaml",
        {"tuned": "tiny", "chat": "tiny"},
        tuned={"adapters": listed, "options": options},
    )
    keys = folder / "keys.yaml"
    keys.write_text("keys: [{name: all, key: all}, {name: some, key: limited, models: ['sq*']}]")
    arguments = ["--models", path, "--models-memory", "16GiB", "--admin-routes"]
    with served(folder, *arguments, "--api-keys-file", str(keys)) as server:
        server.folder = root
        yield server


def text_of(pool, name: str | None, headers=ALL, path="/v1/completions", **more) -> str:
    named = {} if name is None else {"model": name}
    answer = pool.client.post(path, json={**named, **BODY, **more}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def listed(pool, headers=ALL) -> dict:
    cards = pool.client.get("/v1/models", headers=headers).json()["data"]
    return {card["id"]: card for card in cards}


def test_a_key_that_is_limited_to_an_adapter_has_it_alone(pool):
    texts = {name: text_of(pool, name) for name in NAMES}
    assert len({*texts.values()}) == 3
    assert [*listed(pool, LIMITED)] == ["sql"]
    card = pool.client.get("/v1/models/sql", headers=LIMITED).json()
    assert (card["id"], card["parent"]) == ("sql", "tuned")
    assert text_of(pool, "sql", LIMITED) == texts["sql"]
    for name in ("tuned", "prose", "chat", "late"):
        answer = pool.client.post("/v1/completions", json={"model": name, **BODY}, headers=LIMITED)
        assert answer.status_code == 404, (name, answer.text)
        # The names that it offers are the key's own.
        offered = answer.json()["error"]["message"].partition("does not exist.")[2]
        assert not any(repr(other) in offered for other in ("tuned", "prose", "chat", "late"))
        assert pool.client.get(f"/v1/models/{name}", headers=LIMITED).status_code == 404
    answer = pool.client.post("/v1/completions", json=BODY, headers=LIMITED)
    assert answer.status_code == 400 and "'tuned'" not in answer.text
    # The model itself is not reached by a field of the body, nor is another adapter.
    for more in ({"adapters": []}, {"lora": []}):
        assert text_of(pool, "sql", LIMITED, **more) == texts["sql"]
    for more in ({"adapters": [{"name": "prose"}]}, {"adapter": "prose"}, {"lora_path": "prose"}):
        answer = pool.client.post(
            "/v1/completions", json={"model": "sql", **BODY, **more}, headers=LIMITED
        )
        assert answer.status_code in (400, 404), (more, answer.text)
    adapters = pool.client.get("/lora-adapters?model=sql", headers=LIMITED).json()
    assert [adapter["name"] for adapter in adapters] == ["sql"]


@pytest.mark.parametrize("headers", [ALL, LIMITED], ids=["all", "limited"])
def test_the_query_may_name_an_adapter(pool, headers):
    """On routes whose body has no such field, and on those that have one."""
    wanted = text_of(pool, "sql")
    assert text_of(pool, None, headers, "/v1/completions?model=sql") == wanted
    body = {"prompt": BODY["prompt"], "n_predict": 6, "temperature": 0, "ignore_eos": True}
    answer = pool.client.post("/completion?model=sql", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == wanted


def test_adapters_come_and_go(pool):
    """They are listed, answer, and outlast an unload of their model."""

    def post(path, **body):
        return pool.client.post(path, json=body, headers=ALL)

    plain = text_of(pool, "tuned")
    # The engine knows the folders that are there when it starts.
    save_adapters(pool.folder, ["late"])
    for name in ("chat", "tuned"):
        answer = post("/v1/load_lora_adapter?model=tuned", lora_name=name, lora_path="late")
        assert answer.status_code == 400 and repr(name) in answer.text, answer.text
    answer = post("/v1/load_lora_adapter?model=tuned", lora_name="late", lora_path="late")
    assert answer.status_code == 200, answer.text
    card = listed(pool)["late"]
    assert (card["parent"], card["state"]) == ("tuned", "ready")
    assert card["root"].endswith("/more/late")
    text = text_of(pool, "late")
    assert text not in (plain, text_of(pool, "sql"))
    answer = post("/v1/unload_lora_adapter?model=tuned", lora_name="prose")
    assert answer.status_code == 200, answer.text
    for state in ("ready", "cold", "ready"):
        if state == "cold":
            assert post("/models/unload", model="tuned").status_code == 200
        elif listed(pool)["tuned"]["state"] == "cold":
            assert text_of(pool, "late") == text
        cards = listed(pool)
        assert {*cards} == {"tuned", "sql", "late", "chat"}
        assert cards["late"]["state"] == state
        answer = pool.client.post("/v1/completions", json={"model": "prose", **BODY}, headers=ALL)
        assert answer.status_code == 404
    assert post("/v1/unload_lora_adapter?model=tuned", lora_name="late").status_code == 200
    assert post("/models/unload", model="tuned").status_code == 200
    assert text_of(pool, "tuned") == plain
    assert {*listed(pool)} == {"tuned", "sql", "chat"}
