"""Entries whose engines are several processes, or have a drafter: each answers, sleeps, and leaves
nothing behind."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
import transformers
from pool_server import SMALL, served, write_models
from processes import wait_until_gone
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_model_pool.need import memory_of

BODY = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
MIB = 2**20
WEIGHTS = 60 * MIB
DRAFT = 15 * MIB
OPTIONS = {**SMALL, "max_model_len": 256, "max_num_batched_tokens": 64}
PROCESSES = {"ranks": 3, "twins": 2, "drafted": 1}
"""Processes of an entry: an engine and two workers, two engines, and one engine."""
DROPPED = {"ranks": WEIGHTS, "twins": 2 * WEIGHTS, "drafted": WEIGHTS + DRAFT}
"""Bytes of weights in all of an entry's processes. Ranks share those of one engine."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model whose weights are seen in the memory, and a smaller one that drafts for it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for name, layers in (("model", 4), ("draft", 1)):
        config = transformers.LlamaConfig(
            vocab_size=272,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=512,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        randomize(model, seed=layers)
        found[name] = str(make_checkpoint(folder / name, model))
    return found


@pytest.fixture(scope="module")
def pool(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    own = {
        "ranks": {"tensor_parallel_size": 2},
        "twins": {"data_parallel_size": 2},
        "drafted": {
            "drafter": ["draft_model"],
            "plugin_option": {"drafters": {"model": checkpoints["draft"]}},
        },
    }
    path = write_models(
        folder / "models.yaml",
        dict.fromkeys(("plain", *own), checkpoints["model"]),
        plain={"options": OPTIONS},
        **{
            name: {"options": {**OPTIONS, **more}, "idle": "sleep", "sleep_level": 2}
            for name, more in own.items()
        },
    )
    with served(folder, "--models", path, "--models-memory", "16GiB", "--admin-routes") as server:
        server.text = answered(server, "plain")
        yield server


def answered(pool, name: str) -> str:
    answer = pool.client.post("/v1/completions", json={"model": name, **BODY})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def processes(pool) -> set[int]:
    """Engines, and their workers."""
    return {child.pid for child in psutil.Process(pool.process.pid).children(recursive=True)}


def bytes_of(pids: set[int], field: str) -> int:
    """The sum of a field of what the system tells of the processes' memory."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(1024 * int(re.search(rf"^{field}: +(\d+)", text, re.M)[1]) for text in texts)


def own_bytes(pids: set[int]) -> int:
    """Bytes that nobody shares. Those of libraries count by how many processes map them, so that
    others that end would make these greater."""
    return bytes_of(pids, "Anonymous")


def asleep(pool, name: str) -> dict:
    answer = pool.client.post("/models/sleep", json={"model": name})
    assert answer.status_code == 200, answer.text
    card = pool.cards()[name]
    assert (card["state"], card["sleep_level"]) == ("asleep", 2)
    return card


@pytest.mark.parametrize("name", PROCESSES)
def test_an_entry_answers_sleeps_wakes_and_ends_with_all_of_its_processes(pool, name):
    before = processes(pool)
    estimate = pool.cards()[name]["bytes_needed"]
    assert answered(pool, name) == pool.text
    own = processes(pool) - before
    assert len(own) == PROCESSES[name]
    engines = {*pool.engines()} & own
    # All processes of the entry count, and what they share counts once.
    awake = memory_of(engines)
    assert own_bytes(own) < awake <= estimate
    assert awake < bytes_of(own, "Rss") - 20 * MIB * len(own)
    assert awake <= pool.cards()[name]["bytes_needed"] <= estimate
    awake = own_bytes(own)
    resting = []
    for _ in range(3):
        card = asleep(pool, name)
        resting.append(own_bytes(own))
        assert resting[-1] < awake - 0.9 * DROPPED[name]
        # Both by the same rule, at two moments.
        assert abs(memory_of(engines) - card["bytes_resident"]) < 0.5 * WEIGHTS
        assert answered(pool, name) == pool.text
        assert processes(pool) - before == own
    # A sleep leaves nothing behind.
    assert max(resting) < resting[0] + 5 * MIB * len(own)
    assert pool.cards()[name]["loads"] == 1
    assert pool.client.post("/models/unload", json={"model": name}).status_code == 200
    wait_until_gone(*own)
    assert pool.cards()[name]["bytes_resident"] == 0
    assert pool.state("plain") == "ready"


@pytest.mark.parametrize("is_asleep", [False, True], ids=["awake", "asleep"])
def test_a_rank_that_is_killed_ends_its_entry_alone(pool, is_asleep):
    """The other ranks end, too, and the next request starts all of them."""
    before = processes(pool)
    assert answered(pool, "ranks") == pool.text
    own = processes(pool) - before
    old = pool.cards()["ranks"]
    if is_asleep:
        asleep(pool, "ranks")
    worker = max(own - {*pool.engines()})
    os.kill(worker, signal.SIGKILL)
    # A request that comes now finds the entry before or after its end.
    assert answered(pool, "plain") == pool.text
    end = time.monotonic() + 120
    while True:
        answer = pool.client.post("/v1/completions", json={"model": "ranks", **BODY})
        if answer.status_code == 200 or time.monotonic() > end:
            break
        assert answer.status_code in (500, 503) and answer.json()["error"]["message"]
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == pool.text
    card = pool.cards()["ranks"]
    assert card["state"] == "ready" and card["loads"] == old["loads"] + 1
    # One that does not wake up is loaded anew, if its death has not been noticed before.
    assert card["failures"] - old["failures"] in ((0, 1) if is_asleep else (1,))
    wait_until_gone(*own)
    cards = pool.cards()
    assert cards["plain"]["failures"] == 0 and cards["plain"]["loads"] == 1
    assert pool.client.post("/models/unload", json={"model": "ranks"}).status_code == 200
