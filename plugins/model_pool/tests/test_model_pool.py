"""A server of several models: routes, states, budget, crashes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from pool_server import (
    REQUESTS,
    SMALL,
    belady,
    first_line,
    plain,
    request_of,
    served,
    write_checkpoints,
    write_models,
)
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_model_pool.need import PROCESS
from toolkit_lm_server.app import create_app

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def expected(checkpoints):
    """The answer of each model, of a server that has it alone."""

    async def alone(name: str):
        config = VllmConfig.make(
            model=checkpoints[name], served_model_name=[name], engine_process=False, **SMALL
        )
        async with AsyncLLM(config) as llm:
            transport = httpx.ASGITransport(create_app(llm))
            async with httpx.AsyncClient(transport=transport, base_url="http://alone") as client:
                answer = await client.request(**request_of(name))
                assert answer.status_code == 200, answer.text
                return plain(answer.json())

    async def together():
        return {name: await alone(name) for name in REQUESTS}

    return asyncio.run(together())


@pytest.fixture(scope="module")
def pool(checkpoints, tmp_path_factory):
    """A server with room for all."""
    folder = tmp_path_factory.mktemp("pool")
    broken = folder / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    path = write_models(
        folder / "models.yaml",
        {**checkpoints, "broken": str(broken)},
        chat={"aliases": ["gpt-4o"]},
        embed={"options": {**SMALL, "tokenizer_info": True}},
        bart={"keep_alive": 0},
    )
    with served(folder, "--models", path, "--models-memory", "16GiB", "--admin-routes") as server:
        yield server


def test_each_task_is_answered_as_by_a_server_of_that_model_alone(pool, expected):
    with ThreadPoolExecutor(5) as threads:
        for name, answer in threads.map(lambda name: (name, pool.ask(name)), REQUESTS):
            assert answer.status_code == 200, answer.text
            assert plain(answer.json()) == expected[name]


def test_every_route_finds_the_model_that_the_body_names(pool):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path, body in {
        "/v1/completions": {"prompt": "a", "max_tokens": 2},
        "/v1/responses": {"input": "hi", "max_output_tokens": 2},
        "/v1/messages": chat,
        "/v2/chat": chat,
        "/api/chat": {**chat, "stream": False},
        "/tokenize": {"prompt": "a"},
        "/chat/completions/": chat,
    }.items():
        body = {
            key: value for key, value in body.items() if key != "max_tokens" or "api" not in path
        }
        for name in ("chat", "gpt-4o"):
            answer = pool.client.post(path, json={"model": name, **body})
            assert answer.status_code == 200, (path, answer.text)
    tagged = {"model": "chat:latest", "messages": chat["messages"], "stream": False}
    assert pool.client.post("/api/chat", json=tagged).status_code == 200
    for path in ("/score", "/v1/score"):
        body = {"model": "rank", "queries": "a", "documents": ["b"]}
        assert pool.client.post(path, json=body).status_code == 200
    body = {"model": "embed", "input": "a", "task": "embed"}
    assert pool.client.post("/pooling", json=body).status_code == 200
    # A query names the model where a body cannot.
    answer = pool.client.post("/tokenize?model=embed", json={"prompt": "a"})
    assert answer.status_code == 200
    answer = pool.client.get("/tokenizer_info?model=embed")
    assert answer.status_code == 200 and "tokenizer_class" in answer.json()


def test_a_stream_comes_through(pool):
    body = {**request_of("chat")["json"], "stream": True}
    with pool.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    # Texts that wait are sent as one: their number is that of no token.
    [whole] = pool.ask("chat", "chat").json()["choices"]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"]
    assert deltas[0]["role"] == "assistant"


def test_wrong_names_and_bodies(pool):
    answer = pool.ask("chat", "chatt")
    assert answer.status_code == 404
    assert "'chat'" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "model_not_found"
    answer = pool.client.post("/v1/completions", json={"prompt": "a"})
    assert answer.status_code == 400
    assert "'whisper'" in answer.json()["error"]["message"]
    answer = pool.client.post("/v1/completions", json={"prompt": "a", "model": 3})
    assert answer.status_code == 400
    headers = {"content-type": "application/json"}
    for body in (b"{", b'{"model": NaN}', b"[" * 100_000, b'"\xff"'):
        answer = pool.client.post("/v1/completions", content=body, headers=headers)
        assert answer.status_code == 400, body[:10]
    assert pool.client.get("/nothing").status_code == 404
    answer = pool.client.post("/v1/completions", content=b"x" * (17 * MIB), headers=headers)
    assert answer.status_code == 413
    assert answer.headers["x-request-id"]


def test_a_bad_checkpoint_is_told_and_disturbs_nobody(pool):
    answer = pool.client.post("/v1/completions", json={"model": "broken", "prompt": "a"})
    assert answer.status_code == 503
    assert "broken" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    card = pool.cards()["broken"]
    assert card["state"] == "failed" and card["reason"] and card["status"]["failed"]
    assert pool.ask("chat").status_code == 200


def test_the_lists_of_others(pool):
    pool.ask("chat")
    pool.ask("bart")
    pool.until("bart", "cold")
    running = {"model": "chat", "state": "ready", "progress": None}
    assert running in pool.client.get("/running").json()["running"]
    names = [entry["name"] for entry in pool.client.get("/api/tags").json()["models"]]
    assert names == [*REQUESTS, "broken"]
    loaded = [entry["name"] for entry in pool.client.get("/api/ps").json()["models"]]
    assert "chat" in loaded and "bart" not in loaded
    shown = pool.client.post("/api/show", json={"model": "bart"}).json()
    assert shown["details"]["family"] == "bart"
    assert pool.state("bart") == "cold"
    assert pool.client.get("/models").json() == pool.client.get("/v1/models/").json()
    assert pool.client.get("/v1/models/gpt-4o").json()["parent"] == "chat"
    done = subprocess.run(
        [sys.executable, "-c", "from toolkit_lm_cli import main; main()", "ps", "--url", pool.url],
        capture_output=True,
        text=True,
        check=True,
    )
    [row] = [line.split() for line in done.stdout.splitlines() if line.startswith("chat ")]
    assert row[1] == "ready"


def test_an_operator_loads_and_unloads(pool):
    assert pool.client.post("/models/load", json={"model": "embed"}).status_code == 200
    assert pool.state("embed") == "ready"
    done = pool.client.post("/models/unload", json={"model": "embed"}).json()
    assert done == {"success": True, "models": ["embed"]}
    assert pool.state("embed") == "cold"
    pool.ask("embed")
    assert pool.client.post("/unload", json={}).json()["success"]
    assert {card["state"] for card in pool.cards().values()} <= {"cold", "failed"}
    assert pool.engines() == []
    answer = pool.client.post("/models/load", json={"model": "embd"})
    assert answer.status_code == 404


def test_ollamas_keep_alive_unloads(pool):
    asked = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "stream": False}
    answer = pool.client.post("/api/chat", json={**asked, "keep_alive": "soon"})
    assert answer.status_code == 400
    assert pool.client.post("/api/chat", json={**asked, "keep_alive": 0}).status_code == 200
    pool.until("chat", "cold")


def test_a_killed_engine_is_started_again_and_others_go_on(pool, expected):
    pool.ask("embed")
    before = {*pool.engines()}
    pool.ask("chat")
    [victim] = {*pool.engines()} - before
    wrong = []
    end = threading.Event()

    def others():
        while not end.is_set():
            answer = pool.ask("embed")
            if answer.status_code != 200 or plain(answer.json()) != expected["embed"]:
                wrong.append(answer.text)

    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(others)
        os.kill(victim, signal.SIGKILL)
        card = pool.until("chat", "failed", "loading")
        assert "killed by SIGKILL" in card["reason"] or card["failures"] == 1
        answer = pool.ask("chat")
        assert plain(answer.json()) == expected["chat"]
        end.set()
        asking.result()
    assert wrong == []
    assert pool.cards()["chat"]["failures"] == 1
    text = pool.client.get("/metrics").text
    assert 'toolkit_lm_pool_failures_total{model_name="chat"} 1.0' in text
    assert 'toolkit_lm_pool_model_state{model_name="chat",state="ready"} 1.0' in text


def test_figures_of_all_models_are_one_page(pool):
    pool.ask("embed")
    pool.ask("chat")
    text = pool.client.get("/metrics").text
    kinds = Counter(line for line in text.splitlines() if line.startswith("# TYPE"))
    assert set(kinds.values()) == {1}
    samples = Counter(line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#")
    assert set(samples.values()) == {1}
    for name in ("chat", "embed"):
        assert f'toolkit_lm_prompt_tokens_total{{model_name="{name}"}}' in text


def test_a_changed_file_is_read_anew(checkpoints, tmp_path):
    models = {name: checkpoints[name] for name in ("chat", "embed")}
    path = write_models(tmp_path / "models.yaml", models)
    with served(tmp_path, "--models", path, "--admin-routes") as server:
        assert server.ask("chat").status_code == 200
        assert server.ask("embed").status_code == 200
        good = Path(path).read_text()
        Path(path).write_text("models: [")
        answer = server.client.post("/models/reload")
        assert answer.status_code == 400 and "models.yaml:1:1" in answer.json()["error"]["message"]
        assert server.ask("chat").status_code == 200
        assert server.cards()["chat"]["loads"] == 1
        new = {"embed": checkpoints["embed"], "rank": checkpoints["rank"]}
        write_models(tmp_path / "models.yaml", new, embed={"aliases": ["vectors"]})
        done = server.client.post("/models/reload").json()
        assert done == {"added": ["rank"], "changed": ["embed"], "removed": ["chat"]}
        assert server.ask("chat").status_code == 404
        assert server.ask("embed", "vectors").status_code == 200
        assert list(server.cards()) == ["embed", "vectors", "rank"]
        Path(path).write_text(good)
        os.kill(server.process.pid, signal.SIGHUP)
        for _ in range(600):
            if "chat" in server.cards():
                break
            time.sleep(0.1)
        assert server.ask("chat").status_code == 200


def test_keys_see_their_models(checkpoints, tmp_path):
    models = {name: checkpoints[name] for name in ("chat", "embed")}
    path = write_models(tmp_path / "models.yaml", models)
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: all, key: a}\n  - {name: one, key: o, models: ['emb*'], "
        "requests_per_minute: 3}\n"
    )
    with served(tmp_path, "--models", path, "--api-keys-file", str(keys)) as server:
        one = {"Authorization": "Bearer o"}
        answer = server.client.get("/v1/models", headers=one).json()
        assert [card["id"] for card in answer["data"]] == ["embed"]
        assert server.ask("chat", headers=one).status_code == 404
        assert server.ask("embed", headers=one).status_code == 200
        assert server.ask("embed").status_code == 401
        assert server.ask("chat").status_code == 401
        everyone = {"Authorization": "Bearer a"}
        cards = server.client.get("/v1/models", headers=everyone).json()["data"]
        assert {card["id"]: card["state"] for card in cards} == {"chat": "cold", "embed": "ready"}
        # Requests are counted over all routes, those of models and the pool's own.
        statuses = [server.ask("embed", headers=one).status_code for _ in range(3)]
        assert statuses == [200, 429, 429]
        assert server.client.post("/unload", headers=everyone).status_code in (400, 404, 405)


def test_a_trace_in_a_budget_of_two_or_three_models(checkpoints, expected, tmp_path):
    """200 requests of 8 clients, by Zipf's law: each is answered right, nobody waits for long, the
    processes never take more than the budget, and loads are few."""
    path = write_models(tmp_path / "models.yaml", checkpoints)
    # Most of a small model is its process. The estimate counts one alone, the measure what is
    # shared, too.
    budget = 2 * PROCESS + 100 * MIB
    arguments = ["--models", path, "--models-memory", str(budget), "--models-turn", "0.5"]
    with served(tmp_path, *arguments) as server:
        names = list(REQUESTS)
        # Before the first load: by the estimate.
        sizes = {name: card["bytes_needed"] for name, card in server.cards().items()}
        weights = [1 / (place + 1) for place in range(len(names))]
        asked = random.Random(4).choices(names, weights, k=200)
        most = []
        slowest = []
        end = threading.Event()

        def watch():
            while not end.is_set():
                most.append(server.memory())
                slowest.append(server.slowest_load())
                time.sleep(0.1)

        def ask(name):
            start = time.monotonic()
            answer = server.ask(name)
            assert answer.status_code == 200, answer.text
            assert plain(answer.json()) == expected[name]
            return time.monotonic() - start

        with ThreadPoolExecutor(9) as threads:
            watching = threads.submit(watch)
            try:
                seconds = list(threads.map(ask, asked))
            finally:
                end.set()
            watching.result()
        cards = server.cards()
        assert {name for name in names if cards[name]["loads"]} == set(asked)
        assert sum(card["evictions"] for card in cards.values()) > 0
        assert max(most) <= budget
        assert max(seconds) <= 10 * max(slowest)
        loads = sum(card["loads"] for card in cards.values())
        assert loads <= 1.5 * belady(asked, sizes, budget)


def test_what_cannot_fit_is_refused_with_the_numbers(checkpoints, tmp_path):
    models = {name: checkpoints[name] for name in ("chat", "embed")}
    path = write_models(
        tmp_path / "models.yaml",
        models,
        chat={"options": {**SMALL, "num_kv_blocks": 10**7}},
    )
    code = "from toolkit_lm_cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--models", path, "--models-memory", "1GiB"]
    done = subprocess.run([*command, "--port", "0"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "'chat' needs" in done.stderr and "the budget is 1.00 GiB" in done.stderr
    write_models(
        tmp_path / "models.yaml",
        models,
        chat={"options": {**SMALL, "num_kv_blocks": 10**7}, "optional": True},
    )
    with served(tmp_path, "--models", path, "--models-memory", "1GiB") as server:
        answer = server.ask("chat")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_too_large"
        assert server.ask("embed").status_code == 200


def test_a_server_that_prints_nothing_shows_its_stacks(tmp_path):
    log = tmp_path / "server.log"
    code = "import time; time.sleep(1000)"
    with (
        log.open("w") as file,
        subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        ) as process,
    ):
        assert first_line(process, seconds=2) == ""
    assert "Current thread" in log.read_text()
    assert process.returncode == -signal.SIGABRT


def test_a_request_that_waits_too_long_is_told_why(checkpoints, tmp_path):
    models = {name: checkpoints[name] for name in ("chat", "embed")}
    path = write_models(tmp_path / "models.yaml", models, chat={"pin": True})
    budget = str(PROCESS + 100 * MIB)
    arguments = ["--models", path, "--models-memory", budget, "--models-timeout", "1"]
    with served(tmp_path, *arguments) as server:
        server.until("chat", "ready")
        answer = server.ask("embed")
        assert answer.status_code == 503, answer.text
        assert "'chat'" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        assert server.ask("chat").status_code == 200
