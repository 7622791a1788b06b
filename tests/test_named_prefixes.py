"""Named prefixes: they are computed, written, kept, found after a restart, and dropped."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest
import toolkit_lm_tiny
import torch
import uvicorn
from toolkit_lm import AsyncLLM
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import run
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_kv_disk.named import MOST_NAMES, NamedPrefixes
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

ROOT = Path(__file__).parents[1]
BLOCK = 4
SMALL = {
    "block_size": BLOCK,
    "max_model_len": 112,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
    "num_kv_blocks": 100,
    "renderer": "tokens",
    "engine_process": False,
}


def ids(length: int, seed: int = 5) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 272, (length,), generator=generator).tolist()


PROMPT = ids(70)
LENGTH = (len(PROMPT) - 1) // BLOCK * BLOCK


@pytest.fixture
def llama(make_llama):
    return make_llama("named", head_dim=32)[0]


@asynccontextmanager
async def served(model, folder, *, admin=True, routes=None, own=None, **more):
    """A client of a server, with its engine."""
    option = {"kv_disk": {"dir": str(folder), "loads": "always"} | (own or {})}
    extra = more.pop("plugins", ())
    config = VllmConfig.make(model=str(model), plugin_option=option, **SMALL | more)
    plugins = Plugins.load(PluginsConfig(plugin_option=option), extra=extra)
    async with AsyncLLM(config, plugins=plugins) as llm:
        await llm.wait_ready()
        app = create_app(llm, ServerOptions(admin_routes=admin, routes=routes))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client, llm


async def ok(client, method, path, body=None):
    answer = await client.request(method, path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def cached(client, prompt=PROMPT, **fields):
    """Tokens of a prompt that were in the cache, and the answer's."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    found = await ok(client, "POST", "/v1/completions", body | fields)
    return (
        found["usage"]["prompt_tokens_details"]["cached_tokens"],
        found["choices"][0]["token_ids"],
    )


async def refused(client, status, method, path, body=None):
    answer = await client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_a_name_lasts_over_a_restart(llama, tmp_path):
    async def first():
        async with served(llama, tmp_path) as (client, _):
            saved = await ok(client, "POST", "/kv/prefixes", {"name": "m.1", "prompt": PROMPT})
            listed = await ok(client, "GET", "/kv/prefixes")
            return saved, listed, (await cached(client))[1]

    async def second():
        async with served(llama, tmp_path) as (client, _):
            return await ok(client, "GET", "/kv/prefixes"), await cached(client)

    async def without():
        async with served(llama, tmp_path / "other") as (client, _):
            return await cached(client)

    saved, listed, tokens = asyncio.run(first())
    assert (saved["num_tokens"], saved["num_prompt_tokens"]) == (LENGTH, len(PROMPT))
    assert saved["num_cached_tokens"] == 0
    assert saved["is_complete"] and not saved["has_salt"]
    assert 0 < saved["num_bytes"] == listed["num_bytes"] < listed["max_bytes"]
    [entry] = listed["prefixes"]
    assert entry.items() <= saved.items()
    assert (tmp_path / saved["name"]).exists() is False
    again, restored = asyncio.run(second())
    assert again == listed
    assert restored == (LENGTH, tokens)
    assert asyncio.run(without()) == (0, tokens)


def test_what_the_device_has_is_written_too(llama, tmp_path):
    """The disk has dropped it in the meantime, and the device has not."""

    async def main():
        async with served(llama, tmp_path) as (client, _):
            await cached(client)
            await ok(client, "DELETE", "/kv/tiers/kv_disk")
            saved = await ok(client, "POST", "/kv/prefixes", {"name": "a", "prompt": PROMPT})
            await ok(client, "DELETE", "/kv/tiers/device")
            return saved["num_cached_tokens"], (await cached(client))[0]

    assert asyncio.run(main()) == (LENGTH, LENGTH)


def test_named_blocks_outlast_others(llama, tmp_path):
    """The folder has room for a few prompts, and many come by."""

    async def main():
        async with served(llama, tmp_path, own={"disk": "2MiB"}) as (client, llm):
            tier = llm.engine.client.core.scheduler.tiers.tiers["kv_disk"]
            await ok(client, "POST", "/kv/prefixes", {"name": "kept", "prompt": ids(40, 1)})
            await cached(client, ids(40, 2))
            for seed in range(3, 60):
                await cached(client, ids(70, seed))
                assert tier.figures().held_bytes <= 0.8 * 2**21
            assert tier._gone == []
            await ok(client, "DELETE", "/kv/tiers/device")
            return (await cached(client, ids(40, 1)))[0], (await cached(client, ids(40, 2)))[0]

    assert asyncio.run(main()) == (36, 0)


def test_names_have_a_share_of_the_bytes(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path, own={"disk": "1MiB"}) as (client, _):
            names = []
            while len(names) < 40:
                body = {"name": f"n{len(names)}", "prompt": ids(70, len(names))}
                answer = await client.post("/kv/prefixes", json=body)
                listed = await ok(client, "GET", "/kv/prefixes")
                assert listed["num_bytes"] <= listed["max_bytes"] == int(0.25 * int(0.8 * 2**20))
                if answer.status_code != 200:
                    break
                names.append(body["name"])
            assert answer.status_code == 400 and "drop others" in answer.text
            assert [one["name"] for one in listed["prefixes"]] == sorted(names)
            assert len(names) > 1
            # Others go on, and room that is given back is there.
            await cached(client, ids(30, 99))
            await ok(client, "DELETE", f"/kv/prefixes/{names[0]}")
            await ok(client, "POST", "/kv/prefixes", body)

    asyncio.run(main())


def test_dropped_prefixes_are_found_nowhere(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path, own={"host": "8MiB"}) as (client, _):
            for name, salt in (("a", None), ("b", "s1"), ("c", "s1"), ("d", "s2")):
                body = {"name": name, "prompt": PROMPT}
                await ok(
                    client, "POST", "/kv/prefixes", body | ({"cache_salt": salt} if salt else {})
                )
            listed = (await ok(client, "GET", "/kv/prefixes"))["prefixes"]
            assert [(one["name"], one["has_salt"]) for one in listed] == [
                ("a", False),
                ("b", True),
                ("c", True),
                ("d", True),
            ]
            # Blocks that another name needs stay.
            await ok(client, "DELETE", "/kv/prefixes/b")
            assert (await cached(client, cache_salt="s1"))[0] == LENGTH
            dropped = await ok(client, "POST", "/kv/prefixes/drop", {"cache_salt": "s1"})
            assert dropped == {"dropped": ["c"]}
            assert (await cached(client, cache_salt="s1"))[0] == 0
            assert (await cached(client))[0] == LENGTH
            assert (await cached(client, cache_salt="s2"))[0] == LENGTH
            dropped = await ok(client, "POST", "/kv/prefixes/drop", {"all": True})
            assert dropped == {"dropped": ["a", "d"]}
            assert (await cached(client))[0] == 0

    async def restarted():
        async with served(llama, tmp_path) as (client, _):
            return await ok(client, "GET", "/kv/prefixes"), (await cached(client, cache_salt="s2"))

    asyncio.run(main())
    listed, (found, _) = asyncio.run(restarted())
    assert listed["prefixes"] == [] and listed["num_bytes"] == 0
    assert found == 0


def test_a_drop_lasts_although_nothing_follows_it(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path) as (client, _):
            await ok(client, "POST", "/kv/prefixes", {"name": "a", "prompt": PROMPT})
            await ok(client, "DELETE", "/kv/prefixes/a")

    async def restarted():
        async with served(llama, tmp_path) as (client, _):
            return (await cached(client))[0]

    asyncio.run(main())
    assert asyncio.run(restarted()) == 0


def test_a_reset_takes_the_names(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path) as (client, _):
            await ok(client, "POST", "/kv/prefixes", {"name": "a", "prompt": PROMPT})
            await ok(client, "POST", "/reset_prefix_cache")
            listed = (await ok(client, "GET", "/kv/prefixes"))["prefixes"]
            return listed, (await cached(client))[0]

    assert asyncio.run(main()) == ([], 0)


def test_a_tier_is_emptied_alone(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path, own={"host": "8MiB"}) as (client, _):
            await cached(client)
            await ok(client, "DELETE", "/kv/tiers/kv_disk")
            assert (await cached(client))[0] == LENGTH
            await ok(client, "DELETE", "/kv/tiers/device")
            assert (await cached(client))[0] == 0
            await ok(client, "DELETE", "/kv/tiers/kv_host")
            return await refused(client, 400, "DELETE", "/kv/tiers/kv_tape")

    told = asyncio.run(main())
    assert "kv_tape" in told
    assert all(name in told for name in ("device", "kv_disk", "kv_host"))


def test_wrong_requests_are_told_what_is_wrong(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path) as (client, _):
            save = ("POST", "/kv/prefixes")
            for name in ("../up", "a/b", "/etc/passwd", ".hidden", "", "x" * 129, "a\0b", "é"):
                told = await refused(client, 400, *save, {"name": name, "prompt": PROMPT})
                assert told.startswith("name: ")
            assert "short" in await refused(client, 400, *save, {"name": "a", "prompt": [5, 6]})
            for body in ({"prompt": PROMPT, "messages": []}, {}):
                told = await refused(client, 400, *save, {"name": "a"} | body)
                assert "either prompt or messages" in told
            body = {"name": "a", "prompt": PROMPT, "tools": []}
            assert "for messages" in await refused(client, 400, *save, body)
            assert "nothing" in await refused(
                client, 404, *save, {"name": "a", "prompt": PROMPT, "model": "nothing"}
            )
            await ok(client, *save, {"name": "there", "prompt": PROMPT})
            assert "'there'" in await refused(client, 404, "DELETE", "/kv/prefixes/their")
            for body in ({}, {"all": True, "cache_salt": "s"}):
                assert "either" in await refused(client, 400, "POST", "/kv/prefixes/drop", body)
            assert [*(await ok(client, "GET", "/kv/prefixes"))["prefixes"]] != []

    asyncio.run(main())


def test_the_routes_are_for_operators(llama, tmp_path):
    async def main():
        async with served(llama, tmp_path, admin=False) as (client, _):
            return (await client.get("/kv/prefixes")).status_code

    assert asyncio.run(main()) == 404


def test_a_second_engine_names_nothing(llama, tmp_path, caplog):
    async def main():
        async with served(llama, tmp_path) as (client, _):
            await ok(client, "POST", "/kv/prefixes", {"name": "a", "prompt": PROMPT})
            async with served(llama, tmp_path) as (other, _):
                assert (await cached(other))[0] == LENGTH
                body = {"name": "b", "prompt": ids(40, 2)}
                told = await refused(other, 400, "POST", "/kv/prefixes", body)
            return told, (await ok(client, "GET", "/kv/prefixes"))["prefixes"]

    told, listed = asyncio.run(main())
    assert "has not taken" in told or "another engine" in told
    assert [one["name"] for one in listed] == ["a"]


@pytest.mark.parametrize("kind", ["hybrid", "window", "tensor", "selective", "sealed"])
def test_kinds_of_models(request, kind, llama, tmp_path):
    more = {}
    model = llama
    if kind == "hybrid":
        sys.path.insert(0, str(ROOT / "contrib_models" / "hybrid" / "tests"))
        families = importlib.import_module("hybrid_families")
        fields = {
            **families.VARIANTS["Qwen3_5ForCausalLM"]["dense"],
            "max_position_embeddings": 4096,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        made = families.make_model("Qwen3_5ForCausalLM", fields).eval()
        randomize(made)
        model = make_checkpoint(tmp_path / "hybrid", made)
    elif kind == "window":
        model = request.getfixturevalue("make_windowed")()[0]
    elif kind == "selective":
        more = {"own": {"write": "selective"}}
    elif kind == "sealed":
        (tmp_path / "key").write_bytes(bytes(range(32)))
        more = {"own": {"key_file": str(tmp_path / "key"), "host": "8MiB"}}
    else:
        sys.path.insert(0, str(ROOT / "tests" / "plugins" / "threads"))
        threads = importlib.import_module("toolkit_lm_threads")
        more = {"tensor_parallel_size": 2, "plugins": [threads], "executor": "threads"}

    async def main():
        found = []
        for _ in range(2):
            async with served(model, tmp_path / "kv", **more) as (client, _):
                if not found:
                    body = {"name": "a", "prompt": PROMPT}
                    found.append((await ok(client, "POST", "/kv/prefixes", body))["num_tokens"])
                    await ok(client, "DELETE", "/kv/tiers/device")
                found.append(await cached(client))
        async with served(model, tmp_path / "kv", **more) as (client, _):
            found.append(await cached(client))
            await ok(client, "DELETE", "/kv/prefixes/a")
            # The whole prompt leaves, but for the blocks of answers.
            assert (await cached(client))[0] == 0
        return found

    length, *again = asyncio.run(main())
    assert length > 0
    assert [number for number, _ in again] == [length] * 3
    assert again[0] == again[1] == again[2]


def test_files_that_are_damaged_name_nothing(tmp_path, caplog):
    def made(**more):
        return NamedPrefixes(tmp_path, 100, lambda key: 10, writes=True, **more)

    keys = [(0, bytes([n]) * 32) for n in range(20)]
    prefixes = made()
    assert prefixes.add("a", 4, "", keys[:4]) is None
    assert prefixes.add("b", 4, "", keys[2:6]) is None
    assert prefixes.num_bytes == made().num_bytes == 60
    # Another prompt under the same name takes its place; one that is too large does not.
    assert "drop others" in prefixes.add("b", 4, "", keys)
    assert prefixes.add("b", 4, "", keys[8:10]) is None
    assert prefixes.num_bytes == 60 and keys[5] not in prefixes and keys[2] in prefixes
    assert prefixes.drop(["b"]) == keys[8:10]
    path = tmp_path / "names.json"
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    assert made().entries.keys() == {"a"}
    assert NamedPrefixes(tmp_path, 30, lambda key: 10, writes=True).entries == {}
    with caplog.at_level(logging.WARNING):
        other = json.loads(whole) | {"version": 2}
        names = json.loads(whole)
        names["entries"] = {"../a": names["entries"]["a"]}
        for data in (b"", b"{", whole[:-9], b"[]", json.dumps(other).encode(), b"\xff" * 50):
            path.write_bytes(data)
            caplog.clear()
            assert made().entries == {} and caplog.records, data
        path.write_bytes(json.dumps(names).encode())
        assert made().entries == {}
    prefixes = made()
    for number in range(MOST_NAMES):
        prefixes.entries[f"n{number}"] = None
    assert "have names already" in prefixes.add("more", 4, "", keys[:1])


@contextmanager
def listening(model, folder, **more):
    """The address of a server that listens."""
    found = {}
    ended = threading.Event()
    began = threading.Event()

    async def main():
        async with served(model, folder, **more) as (client, _):
            config = uvicorn.Config(client._transport.app, port=0, log_level="error")
            server = uvicorn.Server(config)
            task = asyncio.ensure_future(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            found["url"] = f"http://127.0.0.1:{port}"
            began.set()
            await asyncio.to_thread(ended.wait)
            server.should_exit = True
            await task

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    try:
        assert began.wait(60)
        yield found["url"]
    finally:
        ended.set()
        thread.join(60)


def test_slots_of_llama_cpp(llama, tmp_path):
    async def asked(client, slot, action, name=None):
        body = None if name is None else {"filename": name}
        return await client.post(f"/slots/{slot}", params={"action": action}, json=body)

    async def completed(client, prompt, **fields):
        body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "ignore_eos": True}
        return await ok(client, "POST", "/completion", body | fields)

    async def first():
        async with served(llama, tmp_path, routes=["llama_cpp"]) as (client, _):
            assert (await asked(client, 0, "save", "a")).status_code == 400
            await completed(client, PROMPT)
            made = await completed(client, ids(40, 2), id_slot=1)
            assert made["id_slot"] == 1
            found = []
            for slot, name in ((0, "zero.bin"), (1, "one")):
                answer = await asked(client, slot, "save", name)
                assert answer.status_code == 200, answer.text
                found.append(answer.json())
            for name in ("../a", "a/b", "", ".a"):
                answer = await asked(client, 0, "save", name)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "filename"
            assert (await asked(client, 2, "save", "b")).status_code == 400
            assert (await asked(client, 1, "erase")).json()["n_erased"] == 44
            assert (await asked(client, 1, "save", "b")).status_code == 400
            # A stream has a slot, too.
            body = {"prompt": ids(30, 3), "n_predict": 4, "ignore_eos": True, "stream": True}
            streamed = await client.post("/completion", json=body)
            assert streamed.status_code == 200
            answer = (await asked(client, 0, "save", "streamed")).json()
            assert answer["n_saved"] == (34 - 1) // BLOCK * BLOCK
            return found

    async def second():
        async with served(llama, tmp_path, routes=["llama_cpp"]) as (client, _):
            restored = (await asked(client, 1, "restore", "zero.bin")).json()
            assert (await asked(client, 0, "restore", "nothing")).status_code == 400
            made = await completed(client, [*PROMPT, 5, 6, 7])
            return restored, made["tokens_cached"], (await asked(client, 1, "erase")).json()

    zero, one = asyncio.run(first())
    length = (len(PROMPT) + 4 - 1) // BLOCK * BLOCK
    assert (zero["id_slot"], zero["filename"], zero["n_saved"]) == (0, "zero.bin", length)
    assert zero["n_written"] > 0 < zero["timings"]["save_ms"]
    assert (one["id_slot"], one["n_saved"]) == (1, (44 - 1) // BLOCK * BLOCK)
    restored, cached_tokens, erased = asyncio.run(second())
    assert (restored["id_slot"], restored["filename"], restored["n_restored"]) == (
        1,
        "zero.bin",
        length,
    )
    assert restored["n_read"] == zero["n_written"] and "restore_ms" in restored["timings"]
    assert cached_tokens == LENGTH
    assert erased["n_erased"] == length


TINY = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"


def test_commands(tmp_path, capsys):
    """Of a model with a tokenizer and a chat template."""

    def told(*words):
        code = run(["kv", *words])
        found = capsys.readouterr()
        return code, " ".join((found.out + found.err).split())

    text = tmp_path / "text"
    text.write_text("What is the capital of France? " * 8)
    messages = [{"role": "system", "content": "You are helpful, and brief. " * 8}]
    conversation = tmp_path / "messages.json"
    conversation.write_text(json.dumps(messages))
    wrong = tmp_path / "wrong.json"
    with listening(
        TINY, tmp_path / "kv", renderer="hf", max_model_len=512, num_kv_blocks=400
    ) as url:
        at = ("--url", url)
        code, words = told("save", "a", "--prompt", "What is the capital of Peru? " * 8, *at)
        assert code == 0, words
        length, _, whole = re.match(r"a: (\d+) (of) (\d+) tokens, 0\.", words).groups()
        assert int(length) == (int(whole) - 1) // BLOCK * BLOCK > 0
        assert told("save", "b", "--file", str(text), "--cache-salt", "s", *at)[0] == 0
        code, words = told("save", "c", "--messages", str(conversation), *at)
        assert code == 0, words
        saved = int(words.split()[1])
        body = {"max_tokens": 1}
        body["messages"] = [*messages, {"role": "user", "content": "hi"}]
        with httpx.Client(base_url=url) as client:
            assert client.delete("/kv/tiers/device").status_code == 200
            answer = client.post("/v1/chat/completions", json=body).json()
        # Templates may end a message otherwise where another follows.
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= saved - BLOCK > 0
        code, words = told("list", *at)
        assert code == 0 and words.startswith(f"NAME TOKENS MIB STATE a {length} 0.")
        code, words = told("drop", "d", *at)
        assert code != 0 and "no prefix 'd'" in words
        assert told("drop", "--cache-salt", "s", *at) == (0, "Dropped: b.")
        assert told("drop", "a", *at) == (0, "Dropped: a.")
        assert told("drop", "--all", *at) == (0, "Dropped: c.")
        assert told("drop", "--all", *at) == (0, "Dropped: none.")
        assert told("drop", "--tier", "device", *at) == (0, "device is empty.")
        assert told("drop", "--tier", "a/b", *at)[0] != 0
        code, words = told("drop", "a", "--all", *at)
        assert code != 0 and "one of NAME" in words
        code, words = told("save", "a", *at)
        assert code != 0 and "--messages" in words
        for data in (b"{", b"3", b'{"messages": 3}', b'{"messages": [], "model": "x"}', b"\xff"):
            wrong.write_bytes(data)
            code, words = told("save", "a", "--messages", str(wrong), *at)
            assert code != 0 and str(wrong) in words.replace(" ", ""), words
