"""Files and batches over tiny, in this process: through the openai client, and by hand."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import AsyncOpenAI
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_batches import Options
from toolkit_lm_batches.records import Batch, File
from toolkit_lm_batches.rows import check_rows
from toolkit_lm_batches.store import Store
from toolkit_lm_server.app import create_app
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
KEYS = {"alice": "sk-alice", "bob": "sk-bob"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def engine(folder) -> Iterator[AsyncLLM]:
    options = {"folder": str(folder), "max_files": 200, "max_rows": 50, "concurrency": 2}
    config = VllmConfig.make(
        model="tiny",
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=256,
        engine_process=False,
        plugin_option={"batches": {name: str(value) for name, value in options.items()}},
    )
    llm = AsyncLLM(config)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(
        json.dumps({"keys": [{"name": name, "key": key} for name, key in KEYS.items()]})
    )
    return str(file)


@functools.cache
def app_of(engine: AsyncLLM, **options: Any) -> FastAPI:
    """An app, which takes longer to make than most tests."""
    return create_app(engine, ServerOptions(**options))


@asynccontextmanager
async def served(engine: AsyncLLM, **options: Any) -> AsyncIterator[Any]:
    """served(engine): a function that makes clients of a server with these options."""
    app = app_of(engine, **options)
    async with app.router.lifespan_context(app):

        def client(key: str = "none") -> httpx.AsyncClient:
            headers = {"authorization": f"Bearer {key}"}
            transport = httpx.ASGITransport(app)
            return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)

        yield client


def row(name: str, url: str = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"hi {name}"}], "max_tokens": 4, **fields}
    if url == "/v1/completions":
        body = {"prompt": f"hi {name}", "max_tokens": 4, **fields}
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


async def upload(client: httpx.AsyncClient, content: bytes, **fields: str) -> httpx.Response:
    return await client.post(
        "/v1/files",
        data={"purpose": "batch", **fields},
        files={"file": ("requests.jsonl", content)},
    )


async def begun(client: httpx.AsyncClient, content: bytes, url: str = CHAT, **fields: Any) -> str:
    """The id of a new batch."""
    file = (await upload(client, content)).json()["id"]
    body = {"input_file_id": file, "endpoint": url, "completion_window": "24h", **fields}
    reply = await client.post("/v1/batches", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["id"]


async def ended(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    open_ = ("validating", "in_progress", "finalizing", "cancelling")
    while (reply := (await client.get(f"/v1/batches/{name}")).json())["status"] in open_:
        await asyncio.sleep(0.01)
    return reply


async def rows_of(client: httpx.AsyncClient, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    content = (await client.get(f"/v1/files/{file}/content")).text
    return {row["custom_id"]: row for row in map(json.loads, content.splitlines())}


async def test_a_batch_with_the_openai_client(engine):
    async with served(engine) as client, client() as http:
        api = AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http)
        file = await api.files.create(
            file=("requests.jsonl", lines(row("a"), row("b"), row("c", top_p=5))),
            purpose="batch",
        )
        assert (file.purpose, file.status, file.filename) == (
            "batch",
            "processed",
            "requests.jsonl",
        )
        batch = await api.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"job": "nightly"},
        )
        await ended(http, batch.id)
        batch = await api.batches.retrieve(batch.id)
        assert (batch.status, batch.errors, batch.metadata) == (
            "completed",
            None,
            {"job": "nightly"},
        )
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        assert batch.created_at <= batch.in_progress_at <= batch.completed_at < batch.expires_at
        content = await api.files.content(batch.output_file_id)
        found = {row["custom_id"]: row for row in map(json.loads, content.text.splitlines())}
        assert found.keys() == {"a", "b"}
        live = await api.chat.completions.create(model="tiny", temperature=0, **row("a")["body"])
        assert live.usage.completion_tokens == 4
        assert found["a"]["response"]["body"]["usage"] == live.usage.model_dump(exclude_none=True)
        errors = await rows_of(http, batch.error_file_id)
        assert errors.keys() == {"c"} and errors["c"]["response"]["status_code"] == 400
        listed = [one.id async for one in api.batches.list()]
        assert batch.id in listed
        files = await api.files.list(purpose="batch_output")
        assert {batch.output_file_id, batch.error_file_id} <= {one.id for one in files.data}
        assert (await api.files.delete(file.id)).deleted
        assert (await http.get(f"/v1/files/{file.id}")).status_code == 404


@pytest.mark.parametrize("url", ["/v1/completions", "/v1/responses"])
async def test_other_routes(engine, url):
    body = {"input": "hi", "max_output_tokens": 4} if url == "/v1/responses" else {}
    one = {**row("a", url), **({"body": body} if body else {})}
    async with served(engine) as client, client() as http:
        batch = await ended(http, await begun(http, lines(one), url))
        assert (batch["status"], batch["request_counts"]["completed"]) == ("completed", 1)
        [answer] = (await rows_of(http, batch["output_file_id"])).values()
        assert answer["response"]["status_code"] == 200


async def test_embeddings(tmp_path):
    config = VllmConfig.make(
        model="tiny",
        convert="embed",
        device="cpu",
        dtype="float32",
        max_model_len=48,
        engine_process=False,
        plugin_option={"batches": {"folder": str(tmp_path)}},
    )
    url = "/v1/embeddings"
    one = {"custom_id": "a", "method": "POST", "url": url, "body": {"input": "hi"}}
    llm = AsyncLLM(config)
    try:
        async with served(llm) as client, client() as http:
            batch = await ended(http, await begun(http, lines(one), url))
            [answer] = (await rows_of(http, batch["output_file_id"])).values()
            live = (await http.post(url, json={"input": "hi"})).json()
            assert answer["response"]["body"]["data"] == live["data"]
    finally:
        llm.close()


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty_file", None),
        (b"no json\n", "invalid_request", 1),
        (lines(row("a"), row("a")), "duplicate_custom_id", 2),
        (lines(row("a"), row("b", "/v1/completions")), "mismatched_endpoint", 2),
        (lines(*[row(str(number)) for number in range(51)]), "too_many_requests", None),
        (lines(row("a", stream=True)), "invalid_request", 1),
    ],
)
async def test_a_wrong_input_fails_before_any_request(engine, content, code, line):
    async with served(engine) as client, client() as http:
        batch = await ended(http, await begun(http, content))
        assert (batch["status"], batch["output_file_id"]) == ("failed", None)
        [error] = batch["errors"]["data"]
        assert (error["code"], error["line"]) == (code, line)


async def test_each_key_sees_its_own(engine, keys_file):
    async with served(engine, api_keys_file=keys_file) as client:
        async with client(KEYS["alice"]) as alice, client(KEYS["bob"]) as bob:
            name = await begun(alice, lines(row("a")))
            batch = await ended(alice, name)
            assert batch["request_counts"]["completed"] == 1, batch
            output = batch["output_file_id"]
            for path in (
                f"/v1/batches/{name}",
                f"/v1/files/{output}",
                f"/v1/files/{output}/content",
            ):
                assert (await alice.get(path)).status_code == 200
                assert (await bob.get(path)).status_code == 404
            assert (await bob.post(f"/v1/batches/{name}/cancel")).status_code == 404
            assert (await bob.delete(f"/v1/files/{output}")).status_code == 404
            for path in ("/v1/files", "/v1/batches"):
                assert (await bob.get(path)).json()["data"] == []
                assert (await alice.get(path)).json()["data"]
            body = {
                "input_file_id": batch["input_file_id"],
                "endpoint": CHAT,
                "completion_window": "24h",
            }
            error = (await bob.post("/v1/batches", json=body)).json()["error"]
            assert (error["param"], error["code"]) == ("input_file_id", "file_not_found")
        async with client("wrong") as nobody:
            assert (await nobody.get("/v1/files")).status_code == 401


async def test_a_key_that_is_gone_ends_its_batch(engine, keys_file, folder):
    """Nothing runs for a client that the operator has taken away."""
    async with served(engine, api_keys_file=keys_file) as client, client(KEYS["alice"]) as alice:
        name = await begun(alice, lines(row("a")))
        batch = await ended(alice, name)
    path = folder / "batches" / f"{name}.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "owner": "carol", "status": "in_progress"}))
    async with served(engine, api_keys_file=keys_file) as client:
        while json.loads(path.read_text())["status"] == "in_progress":
            await asyncio.sleep(0.01)
        [error] = json.loads(path.read_text())["errors"]
        assert "'carol'" in error["message"] and batch["status"] == "completed"


async def test_a_batch_survives_the_server(engine, folder, monkeypatch):
    """What is answered is not asked again, and the rest is."""
    content = lines(*[row(str(number)) for number in range(12)])
    async with served(engine) as client, client() as http:
        name = await begun(http, content)
        while (await http.get(f"/v1/batches/{name}")).json()["request_counts"]["completed"] < 2:
            await asyncio.sleep(0.001)
    kept = json.loads((folder / "batches" / f"{name}.json").read_text())
    assert kept["status"] == "in_progress"
    part = folder / "batches" / f"{name}.part"
    before = part.read_bytes()
    first = [json.loads(line)["id"] for line in before.splitlines()]
    part.write_bytes(before + b'{"id": "cut in the mid')
    async with served(engine) as client, client() as http:
        batch = await ended(http, name)
        assert (batch["status"], batch["request_counts"]) == (
            "completed",
            {"total": 12, "completed": 12, "failed": 0},
        )
        found = await rows_of(http, batch["output_file_id"])
        assert found.keys() == {str(number) for number in range(12)}
        assert set(first) <= {answer["id"] for answer in found.values()}
        assert not part.exists()


async def test_a_cancelled_batch_keeps_its_answers(engine):
    content = lines(*[row(str(number), max_tokens=64) for number in range(40)])
    async with served(engine) as client, client() as http:
        name = await begun(http, content)
        while (await http.get(f"/v1/batches/{name}")).json()["request_counts"]["completed"] < 1:
            await asyncio.sleep(0.001)
        file = (await http.get(f"/v1/batches/{name}")).json()["input_file_id"]
        error = (await http.delete(f"/v1/files/{file}")).json()["error"]
        assert error["code"] == "file_in_use"
        assert (await http.post(f"/v1/batches/{name}/cancel")).json()["status"] == "cancelling"
        batch = await ended(http, name)
        assert batch["status"] == "cancelled" and batch["cancelled_at"] >= batch["cancelling_at"]
        found = await rows_of(http, batch["output_file_id"])
        assert 1 <= len(found) == batch["request_counts"]["completed"] < 40
        again = await http.post(f"/v1/batches/{name}/cancel")
        assert (again.status_code, again.json()["error"]["param"]) == (400, "batch_id")


async def test_a_batch_expires(engine, folder):
    """Requests that were not answered have an error each."""
    async with served(engine) as client, client() as http:
        name = await begun(http, lines(row("a"), row("b")))
        await ended(http, name)
    path = folder / "batches" / f"{name}.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "status": "in_progress", "expires_at": 1}))
    async with served(engine) as client, client() as http:
        batch = await ended(http, name)
        assert (batch["status"], batch["output_file_id"]) == ("expired", None)
        errors = await rows_of(http, batch["error_file_id"])
        assert {name: row["error"]["code"] for name, row in errors.items()} == {
            "a": "batch_expired",
            "b": "batch_expired",
        }


async def test_live_requests_go_first(engine, monkeypatch):
    """No row begins while a live request waits for a place in the batch."""
    waiting = 7
    monkeypatch.setattr(AsyncLLM, "num_queued_tokens", property(lambda self: waiting))
    async with served(engine) as client, client() as http:
        name = await begun(http, lines(row("a")))
        while (await http.get(f"/v1/batches/{name}")).json()["status"] == "validating":
            await asyncio.sleep(0.001)
        reply = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert reply.status_code == 200
        assert (await http.get(f"/v1/batches/{name}")).json()["request_counts"]["completed"] == 0
        waiting = 0
        assert (await ended(http, name))["request_counts"]["completed"] == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "vision"}, "purpose"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, None),
        ({"unknown": "x"}, "unknown"),
    ],
)
async def test_wrong_files_are_refused(engine, fields, param):
    async with served(engine) as client, client() as http:
        reply = await upload(http, b"x", **fields)
        assert reply.status_code == 400, reply.text
        if param is not None:
            assert reply.json()["error"]["param"] == param
        assert (await http.post("/v1/files", data={"purpose": "batch"})).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"endpoint": "/v1/models"},
        {"completion_window": "1h"},
        {"metadata": {"a": 1}},
        {"metadata": {"a" * 65: "x"}},
        {"metadata": {str(number): "x" for number in range(17)}},
        {"input_file_id": "../../lock"},
        {"input_file_id": "\ud800"},
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        {"unknown": 1},
    ],
)
async def test_wrong_batches_are_refused(engine, fields):
    async with served(engine) as client, client() as http:
        file = (await upload(http, lines(row("a")))).json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **fields}
        reply = await http.post("/v1/batches", content=json.dumps(body), headers=JSON)
        assert reply.status_code == 400, reply.text
        assert (await http.delete(f"/v1/files/{file}")).status_code == 200


JSON = {"content-type": "application/json"}
FORM = {"content-type": "multipart/form-data; boundary=x"}
BROKEN = [
    ("/v1/batches", JSON, b""),
    ("/v1/batches", JSON, b"[1]"),
    ("/v1/batches", JSON, b'{"input_file_id": '),
    ("/v1/batches", JSON, b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("/v1/batches", JSON, b'{"metadata": {"a": ' + b"9" * 100_000 + b"}}"),
    ("/v1/batches", JSON, b'{"\xff": 1}'),
    ("/v1/batches", FORM, b"--x--"),
    ("/v1/files", FORM, b""),
    ("/v1/files", FORM, b"--y--"),
    ("/v1/files", FORM, b"--x\r\n\r\n"),
    ("/v1/files", FORM, b"--x\r\ncontent-disposition: form-data; name=file\r\n\r\nx\r\n--x--"),
    ("/v1/files", {"content-type": "multipart/form-data"}, b"--x--"),
    ("/v1/files", JSON, b'{"file": "x", "purpose": "batch"}'),
]


@pytest.mark.parametrize(("path", "headers", "content"), BROKEN)
async def test_broken_bodies_are_refused_and_leave_nothing(engine, folder, path, headers, content):
    async with served(engine) as client, client() as http:
        before = sorted(folder.rglob("*"))
        reply = await http.post(path, content=content, headers=headers)
        assert reply.status_code in (400, 415), reply.text
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert len(reply.content) < 3000
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["x", "..%2F..%2Flock", "file-" + "0" * 10_000, "%00"])
async def test_unknown_names_are_404(engine, name):
    async with served(engine) as client, client() as http:
        for method, path in (
            ("GET", f"/v1/files/{name}"),
            ("GET", f"/v1/files/{name}/content"),
            ("DELETE", f"/v1/files/{name}"),
            ("GET", f"/v1/batches/{name}"),
            ("POST", f"/v1/batches/{name}/cancel"),
        ):
            reply = await http.request(method, path)
            assert reply.status_code == 404 and len(reply.content) < 3000, reply.text


def store_of(folder: Path, **options: Any) -> Store:
    store = Store(Options(folder=str(folder), **options))
    store.open()
    return store


def kept(store: Store, owner: str, **fields: Any) -> File:
    file = store.new_file(owner, "x", "batch", 100)
    for name, value in fields.items():
        setattr(file, name, value)
    store.reserve(owner, file.bytes)
    store.content(file.id).write_bytes(b"x" * file.bytes)
    store.files.save(file)
    return file


def test_room_is_shared(tmp_path):
    store = store_of(tmp_path, max_bytes="1000", max_files=8)
    for _ in range(7):
        kept(store, "alice")
    assert (store.room("alice"), store.room("bob")) == (175, 262)
    with pytest.raises(ApiError, match="max_bytes"):
        store.reserve("alice", 176)
    with pytest.raises(ApiError, match="max_files"):
        store.check_number(store.files, "alice", "files")
    store.check_number(store.files, "bob", "files")
    store.close()
    again = store_of(tmp_path, max_bytes="1000")
    assert again.room("alice") == 175 and len(again.files.all) == 7
    again.close()


def test_files_expire_unless_a_batch_reads_them(tmp_path):
    store = store_of(tmp_path)
    old = kept(store, "alice", expires_at=5)
    read = kept(store, "alice", expires_at=5)
    batch = Batch(
        id="batch_1",
        owner="alice",
        has_key=False,
        endpoint=CHAT,
        input_file_id=read.id,
        created_at=0,
        expires_at=int(time.time()) + 60,
        output_seconds=3600,
    )
    store.batches.save(batch)
    store.expire()
    assert store.files.all.keys() == {read.id} and not store.content(old.id).exists()
    batch.turn("completed", 1)
    store.batches.save(batch)
    store.expire()
    assert not store.files.all and not store.batches.all
    assert [path.name for path in (tmp_path / "files").iterdir()] == []
    store.close()


def test_one_server_uses_the_folder(tmp_path):
    store = store_of(tmp_path)
    with pytest.raises(ConfigError, match="in use by another server"):
        store_of(tmp_path)
    store.close()
    store_of(tmp_path).close()


def test_what_is_no_record_is_left_out(tmp_path, caplog):
    store = store_of(tmp_path)
    file = kept(store, "alice")
    (tmp_path / "files" / "broken.json").write_bytes(b"{")
    (tmp_path / "files" / "other.json").write_bytes(store.files.path(file.id, "json").read_bytes())
    store.close()
    again = store_of(tmp_path)
    assert again.files.all.keys() == {file.id} and "broken.json" in caplog.text
    again.close()


def test_errors_of_an_input_are_bounded(tmp_path):
    path = tmp_path / "input"
    path.write_bytes(b"x\n" * 1000)
    total, errors = check_rows(path, CHAT, 5000, 100)
    assert (total, len(errors)) == (1000, 100)


@pytest.mark.parametrize("options", [{"max_bytes": "much"}, {"max_files": 0}, {"concurrency": 0}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError, match=f"batches.{next(iter(options))}"):
        Options(folder="x", **options)


async def test_without_a_folder_there_are_no_routes():
    config = VllmConfig.make(
        model="tiny", device="cpu", dtype="float32", max_model_len=48, engine_process=False
    )
    engine = AsyncLLM(config)
    try:
        async with served(engine) as client, client() as http:
            reply = await http.get("/v1/files")
            assert (reply.status_code, "batches.folder" in reply.text) == (404, True)
    finally:
        engine.close()
