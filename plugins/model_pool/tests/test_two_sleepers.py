"""Two models that sleep, under a budget that cannot hold both awake: their processes' memory is
measured while clients take turns."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import transformers
from pool_server import SMALL, served, write_models
from toolkit_lm_devkit import make_checkpoint, randomize

MIB = 2**20
NAMES = ("left", "right")
WEIGHTS = 360 * MIB
BODY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
pytestmark = pytest.mark.slow


def options(num_kv_blocks: int) -> dict:
    return {**SMALL, "num_kv_blocks": num_kv_blocks, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two models of the same shape, with other weights."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for seed, name in enumerate(NAMES):
        config = transformers.LlamaConfig(
            vocab_size=272,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            # A cache has no more blocks than 64 sequences of this length take.
            max_position_embeddings=4096,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        randomize(model, seed=seed)
        found[name] = str(make_checkpoint(folder / name, model))
    return found


def answered(server, name: str) -> str:
    answer = server.client.post("/v1/completions", json={"model": name, **BODY})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def roomy(checkpoints, tmp_path_factory):
    """The texts of a server with room for both, and the bytes that its engines take."""
    folder = tmp_path_factory.mktemp("roomy")
    path = write_models(folder / "models.yaml", checkpoints)
    with served(folder, "--models", path, "--models-memory", "16GiB") as server:
        texts = {name: answered(server, name) for name in NAMES}
        memory = server.memory()
    assert len({*texts.values()}) == len(NAMES)
    return texts, memory


@contextmanager
def watched(server):
    """A list of the bytes that the engines take, 20 times a second."""
    taken: list[int] = []
    end = threading.Event()

    def watch():
        while not end.wait(0.05):
            taken.append(server.memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield taken
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize(
    ("level", "num_kv_blocks", "beside"),
    [(2, 6144, 600 * MIB), (1, 1024, 10 * MIB)],
    ids=["asleep", "unloaded"],
)
def test_two_take_turns_in_a_budget_for_one(
    checkpoints, roomy, tmp_path, level, num_kv_blocks, beside
):
    """Where sleep makes room enough, both keep their processes. Where it does not, since weights
    stay at level 1, one is unloaded. The memory never has the weights of both."""
    texts, both_awake = roomy
    fields = {"options": options(num_kv_blocks), "idle": "sleep", "sleep_level": level}
    path = write_models(tmp_path / "models.yaml", checkpoints, **dict.fromkeys(NAMES, fields))
    # An engine's process by the estimate, the weights, the KV cache, and what a step needs.
    budget = (400 + 8) * MIB + WEIGHTS + num_kv_blocks * 16 * 2 * 6 * 2 * 128 * 4 + beside
    arguments = ["--models", path, "--models-memory", str(budget), "--models-turn", "0"]
    with served(tmp_path, *arguments) as server, watched(server) as taken:
        for _ in range(2):
            for name in NAMES:
                assert answered(server, name) == texts[name]
                [other] = {*NAMES} - {name}
                assert server.state(name) == "ready"
                assert server.state(other) != "ready"
        # Both at once: they take turns.
        with ThreadPoolExecutor(len(NAMES)) as threads:
            asked = [name for name in NAMES for _ in range(3)]
            found = list(threads.map(lambda name: answered(server, name), asked))
            assert found == [texts[name] for name in asked]
        cards = server.cards()
    assert max(taken) <= min(budget, both_awake - WEIGHTS // 2)
    assert all(card["failures"] == 0 for card in cards.values())
    if level == 2:
        assert [card["loads"] for card in cards.values()] == [1, 1]
        assert [card["evictions"] for card in cards.values()] == [0, 0]
        assert all(card["sleeps"] >= 1 for card in cards.values())
    else:
        assert all(card["loads"] >= 2 for card in cards.values())
        assert sum(card["evictions"] for card in cards.values()) >= 3
