"""A server of a folder of models: the commands that manage it, the description of its routes, and
Ollama's requests that only load or unload."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toolkit_lm_tiny
from pool_server import served, write_checkpoints
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

TINY = Path(toolkit_lm_tiny.__file__).with_name("checkpoint")
SIZES = ["--num-kv-blocks", "256", "--max-num-seqs", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    models = folder / "models"
    models.mkdir()
    checkpoints = write_checkpoints(folder)
    shutil.copytree(TINY, models / "chat")
    shutil.copytree(checkpoints["embed"], models / "embed")
    (models / "notes").mkdir()
    (models / "notes" / "readme.txt").write_text("no model")
    arguments = ["--models-dir", str(models), "--models-memory", "8GiB", "--admin-routes"]
    with served(folder, *arguments, *SIZES) as server:
        yield server


@pytest.fixture
def run(pool):
    """Runs a command of `toolkit` for the server."""

    def call(*arguments: str, url: str = pool.url) -> subprocess.CompletedProcess[str]:
        code = "from toolkit_lm_cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments, "--url", url],
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


def test_a_folder_is_served_and_managed(pool, run):
    assert list(pool.cards()) == ["chat", "embed"]
    listed = rows(run("ps"))
    assert listed["MODEL"][0] == "STATE"
    assert listed["chat"][0] == listed["embed"][0] == "cold"
    done = run("load", "chat")
    assert (done.returncode, done.stdout) == (0, "chat is ready.\n")
    listed = rows(run("ps"))
    assert listed["chat"][0] == "ready" and listed["chat"][-1] == "1"
    assert listed["embed"][0] == "cold"
    body = {"model": "embed", "input": "a text"}
    assert pool.client.post("/v1/embeddings", json=body).status_code == 200
    done = run("unload", "chat")
    assert (done.returncode, done.stdout) == (0, "Unloaded: chat.\n")
    assert {name: row[0] for name, row in rows(run("ps")).items() if name != "MODEL"} == {
        "chat": "cold",
        "embed": "ready",
    }
    done = run("unload")
    assert done.returncode == 0 and "embed" in done.stdout
    assert pool.engines() == []


def test_a_command_tells_what_is_wrong(run):
    done = run("load", "chatt")
    assert done.returncode == 1 and "'chatt' does not exist" in done.stderr
    assert "'chat'" in done.stderr and "Traceback" not in done.stderr
    done = run("ps", url="http://127.0.0.1:9")
    assert done.returncode == 1 and "no answer from the server at http://127.0.0.1:9" in done.stderr
    done = run("load", "chat", url="nowhere")
    assert done.returncode == 2 and "'nowhere' is not the address of a server" in done.stderr


def references(part) -> set[str]:
    """Names of the schemas that a description refers to."""
    if isinstance(part, list):
        return set().union(*map(references, part))
    if not isinstance(part, dict):
        return set()
    own = {part["$ref"].rpartition("/")[2]} if isinstance(part.get("$ref"), str) else set()
    return own.union(*map(references, part.values()))


@pytest.fixture(scope="module")
def alone():
    """The description of a server of one model, with the same options."""
    llm = AsyncLLM(VllmConfig.make(model=str(TINY), engine_process=False, device="cpu"))
    try:
        return json.loads(json.dumps(create_app(llm, ServerOptions(admin_routes=True)).openapi()))
    finally:
        llm.close()


def test_the_description_has_the_models_routes(pool, alone):
    cold = pool.client.get("/openapi.json").json()
    assert pool.client.post("/models/load", json={"model": "chat"}).status_code == 200
    whole = pool.client.get("/openapi.json").json()
    assert {*alone["paths"]} <= {*whole["paths"]}
    own = {"/models/load", "/models/unload", "/running", "/v1/models", "/api/show"}
    assert own <= {*whole["paths"]}
    if pool.cards()["chat"]["loads"] == 1:
        assert own <= {*cold["paths"]} and "once a model has been loaded" in str(cold["info"])
    for path, operations in alone["paths"].items():
        if path in cold["paths"]:
            assert whole["paths"][path] == cold["paths"][path]
        else:
            assert {*operations} == {*whole["paths"][path]}
    for path in ("/v1/chat/completions", "/v1/embeddings", "/api/chat"):
        assert "200" in whole["paths"][path]["post"]["responses"]
    schemas = whole["components"]["schemas"]
    assert references(whole) == {*schemas}
    assert "messages" in schemas[chat_body(whole)]["properties"]
    ids = [
        operation["operationId"]
        for operations in whole["paths"].values()
        for operation in operations.values()
    ]
    assert len(ids) == len({*ids})
    # It stays when the model goes.
    assert pool.client.post("/unload", json={}).status_code == 200
    assert pool.client.get("/openapi.json").json()["paths"].keys() == whole["paths"].keys()


def chat_body(description) -> str:
    operation = description["paths"]["/v1/chat/completions"]["post"]
    [name] = references(operation["requestBody"])
    return name


def test_schemas_of_one_name_are_kept_apart():
    from toolkit_lm_model_pool.description import merged

    def described(path, schema, **more):
        answer = {"schema": {"$ref": "#/components/schemas/Card"}}
        return {
            "info": {},
            "paths": {path: {"get": {"answer": answer}}},
            "components": {"schemas": {"Card": schema, **more}},
        }

    mine = described("/a", {"title": "mine"})
    theirs = described(
        "/b", {"items": {"$ref": "#/components/schemas/Part"}}, Part={"title": "p"}, Lost={}
    )
    both = merged(mine, theirs)
    assert both["components"]["schemas"] == {
        "Card": {"title": "mine"},
        "CardOfModel": {"items": {"$ref": "#/components/schemas/Part"}},
        "Part": {"title": "p"},
    }
    assert references(both["paths"]["/b"]) == {"CardOfModel"}
    assert references(both["paths"]["/a"]) == {"Card"}
    # The same one is one.
    assert merged(mine, described("/b", {"title": "mine"}))["components"]["schemas"].keys() == {
        "Card"
    }


@pytest.mark.parametrize(
    ("path", "empty"),
    [
        ("/api/generate", {}),
        ("/api/generate", {"prompt": ""}),
        ("/api/chat", {}),
        ("/api/chat", {"messages": []}),
    ],
)
def test_ollamas_empty_request_loads_or_unloads(pool, path, empty):
    answer = pool.client.post(path, json={"model": "chat", **empty})
    assert answer.json()["done_reason"] == "load", answer.text
    assert pool.state("chat") == "ready"
    loads = pool.cards()["chat"]["loads"]
    for keep_alive in (0, "0s"):
        body = {"model": "chat", "keep_alive": keep_alive, **empty}
        answer = pool.client.post(path, json=body).json()
        assert answer["done"] and answer["done_reason"] == "unload" and answer["model"] == "chat"
        assert answer.get("response") == "" or answer["message"]["content"] == ""
        pool.until("chat", "cold")
    # A cold one is not loaded for it.
    assert pool.cards()["chat"]["loads"] == loads
    answer = pool.client.post(path, json={"model": "chatt", "keep_alive": 0})
    assert answer.status_code == 404
