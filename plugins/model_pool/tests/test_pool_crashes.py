"""Engines that are killed while all models are asked."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_server import REQUESTS, plain, request_of, served, write_checkpoints, write_models


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crashes")
    path = write_models(folder / "models.yaml", write_checkpoints(folder))
    with served(folder, "--models", path, "--models-memory", "16GiB") as server:
        yield server


def test_each_engine_is_killed_at_random_and_others_answer_on(pool):
    """Answers of others are right, those of the victim are right or errors, and the list tells."""
    pids: dict[str, int] = {}
    expected = {}
    for name in REQUESTS:
        answer = pool.ask(name)
        assert answer.status_code == 200, answer.text
        expected[name] = plain(answer.json())
        # The first one has the process that was started with the server.
        [pids[name]] = {*pool.engines()} - {*pids.values()}
    victim = ""
    end = threading.Event()
    wrong = []
    numbers = defaultdict(lambda: [0, 0])

    def ask_on(name):
        while not end.is_set():
            # A request of the victim may have begun before the kill, or end after its restart.
            before = victim
            answer = pool.client.request(**request_of(name))
            is_error = answer.status_code >= 500 and answer.json()["error"]["message"]
            if not (is_error and name in (before, victim)) and (
                answer.is_error or plain(answer.json()) != expected[name]
            ):
                wrong.append((name, before, victim, answer.status_code, answer.text[:300]))
            numbers[name][bool(is_error)] += 1
            # A dozen times a second: more would only keep the engines from starting.
            time.sleep(0.08)

    rng = random.Random(7)
    order = rng.sample(list(REQUESTS), len(REQUESTS))
    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        asking = [threads.submit(ask_on, name) for name in REQUESTS]
        try:
            for name in order:
                time.sleep(rng.uniform(0.1, 0.6))
                others = {other: numbers[other][0] for other in REQUESTS if other != name}
                victim = name
                os.kill(pids[name], signal.SIGKILL)
                for _ in range(1200):
                    card = pool.cards()[name]
                    if card["failures"] == 1:
                        break
                    time.sleep(0.05)
                assert card["failures"] == 1, card
                pool.until(name, "ready")
                # Nobody stood still meanwhile.
                assert all(numbers[other][0] > count for other, count in others.items())
        finally:
            end.set()
        for future in asking:
            future.result()
    assert wrong == []
    cards = pool.cards()
    assert {name: card["failures"] for name, card in cards.items()} == dict.fromkeys(REQUESTS, 1)
    assert {name: card["loads"] for name, card in cards.items()} == dict.fromkeys(REQUESTS, 2)
    for name in REQUESTS:
        assert plain(pool.ask(name).json()) == expected[name]


def test_the_list_tells_how_an_engine_ended(pool):
    for name in REQUESTS:
        assert pool.ask(name).status_code == 200
    # Nothing is asked then: a failed one starts with the next request.
    for pid in pool.engines():
        os.kill(pid, signal.SIGKILL)
    for name in REQUESTS:
        card = pool.until(name, "failed")
        assert "killed by SIGKILL" in card["reason"], card
        assert card["status"] == {"value": "unloaded", "failed": True}
        assert card["requests_in_flight"] == 0
    assert pool.client.get("/health").status_code == 200
    assert pool.ask("embed").status_code == 200
    assert pool.cards()["embed"]["reason"] is None
