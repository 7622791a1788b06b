"""Models that sleep: their processes stay, their memory does not, and answers are as before."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from pool_server import (
    ADAPTERS,
    SMALL,
    plain,
    save_adapters,
    served,
    write_checkpoints,
    write_models,
)
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import make_checkpoint, randomize
from toolkit_lm_lora.front import LoRARequest

MIB = 2**20
LARGE = {**SMALL, "num_kv_blocks": 4096, "max_num_batched_tokens": 64}
KV_BYTES = 4096 * 16 * 2 * 4 * 2 * 128 * 4
WEIGHTS = 240 * MIB
LONG = {"prompt": "Once upon a time there was a very long prompt. " * 4, "max_tokens": 4}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Small checkpoints, and a `large` one whose weights are seen in the memory."""
    import transformers

    folder = tmp_path_factory.mktemp("checkpoints")
    config = transformers.LlamaConfig(
        vocab_size=272,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    large = transformers.LlamaForCausalLM(config).eval()
    randomize(large)
    return {**write_checkpoints(folder), "large": str(make_checkpoint(folder / "large", large))}


@pytest.fixture(scope="module")
def pool(checkpoints, tmp_path_factory):
    """A server with room for all, whose models sleep."""
    folder = tmp_path_factory.mktemp("pool")
    tier = {"kv_disk": {"dir": str(folder / "kv"), "loads": "always"}}
    path = write_models(
        folder / "models.yaml",
        {**checkpoints, "twin": checkpoints["large"], "tuned": "tiny"},
        chat={"options": {**SMALL, "plugin_option": tier}, "idle": "sleep"},
        embed={"idle": "sleep", "sleep_level": 1},
        large={"options": LARGE, "idle": "sleep", "keep_alive": "30m"},
        twin={"options": LARGE},
        tuned={"adapters": save_adapters(folder)},
    )
    with served(folder, "--models", path, "--models-memory", "16GiB", "--admin-routes") as server:
        answered(server)
        [server.large] = server.engines()
        yield server


def asleep(pool, name: str, **more):
    answer = pool.client.post("/models/sleep", json={"model": name, **more})
    assert answer.json() == {"success": True, "models": [name]}, answer.text
    return pool.cards()[name]


def answered(pool, name: str = "large") -> dict:
    answer = pool.client.post("/v1/completions", json={"model": name, "temperature": 0, **LONG})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_model_keeps_its_process_and_answers_as_before(pool, level):
    before = answered(pool)
    [*engines] = pool.engines()
    awake = pool.until("large", "ready")["bytes_resident"]
    card = asleep(pool, "large", level=level)
    assert (card["state"], card["sleep_level"]) == ("asleep", level)
    assert card["status"] == {"value": "sleeping", "failed": False}
    running = {"model": "large", "state": "asleep", "progress": None}
    assert running in pool.client.get("/running").json()["running"]
    loaded = {tag["name"]: tag["state"] for tag in pool.client.get("/api/ps").json()["models"]}
    assert loaded["large"] == "asleep"
    if level == 2:
        assert card["bytes_resident"] < awake - 0.8 * WEIGHTS
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: answered(pool), range(4)))
    assert {answer["choices"][0]["text"] for answer in answers} == {before["choices"][0]["text"]}
    assert pool.engines() == engines
    assert pool.cards()["large"]["loads"] == 1


def test_levels_follow_one_another_and_an_operator_wakes(pool):
    answered(pool)
    assert asleep(pool, "large", level=1)["sleep_level"] == 1
    assert asleep(pool, "large", level=2)["sleep_level"] == 2
    assert asleep(pool, "large", level=1)["sleep_level"] == 2
    assert pool.client.post("/models/wake_up", json={"model": "large"}).status_code == 200
    assert pool.state("large") == "ready"
    # The names of vLLM's routes.
    assert pool.client.post("/sleep?model=large&level=2").status_code == 200
    assert pool.client.get("/is_sleeping?model=large").json() == {"is_sleeping": True}
    assert pool.client.post("/wake_up?model=large").status_code == 200
    assert pool.client.get("/is_sleeping?model=large").json() == {"is_sleeping": False}
    assert pool.client.post("/sleep?model=large&level=3").status_code == 400
    assert pool.client.post("/sleep").status_code == 400


def test_adapters_are_models_of_their_own(pool):
    """They are answered as by an engine that has them by its options, and share one engine."""
    [*engines] = pool.engines()
    texts = {name: answered(pool, name)["choices"][0]["text"] for name in ("tuned", *ADAPTERS)}
    assert len(set(texts.values())) == 3
    assert len(pool.engines()) == len(engines) + 1
    cards = pool.cards()
    assert [cards[name]["parent"] for name in ADAPTERS] == ["tuned", "tuned"]
    assert cards["tuned"]["parent"] is None
    assert cards["sql"]["state"] == "ready" and cards["sql"]["root"].endswith("/sql")
    plugins = {
        "lora": {"enabled": True, "modules": [f"{name}={cards[name]['root']}" for name in ADAPTERS]}
    }
    with LLM("tiny", plugin_option=plugins, **SMALL) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        [plain_text] = llm.generate([LONG["prompt"]], params)
        assert plain_text.outputs[0].text == texts["tuned"]
        for name in ADAPTERS:
            adapter = LoRARequest(name, 1 + ADAPTERS.index(name), cards[name]["root"])
            [made] = llm.generate([LONG["prompt"]], params, lora_request=adapter)
            assert made.outputs[0].text == texts[name]


def test_what_cannot_sleep_is_told(pool):
    answered(pool, "sql")
    answer = pool.client.post("/models/sleep", json={"model": "rank", "level": 1})
    assert answer.status_code == 400 and "is cold" in answer.json()["error"]["message"]
    answer = pool.client.post("/models/sleep", json={"model": "tuned"})
    assert answer.status_code == 400
    assert "adapters" in answer.json()["error"]["message"]
    text = answered(pool, "sql")["choices"][0]["text"]
    assert asleep(pool, "tuned", level=1)["sleep_level"] == 1
    assert answered(pool, "sql")["choices"][0]["text"] == text


def test_an_idle_model_falls_asleep_and_is_unloaded_from_its_sleep(pool):
    before = plain(pool.ask("embed").json())
    asked = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "stream": False}
    assert pool.client.post("/api/chat", json={**asked, "keep_alive": 0}).status_code == 200
    assert pool.until("chat", "asleep")["loads"] == 1
    assert asleep(pool, "embed")["sleep_level"] == 1
    assert plain(pool.ask("embed").json()) == before
    asleep(pool, "embed")
    assert pool.client.post("/models/unload", json={"model": "embed"}).status_code == 200
    assert pool.state("embed") == "cold"


def test_a_killed_sleeper_is_told_and_started_again(pool):
    text = answered(pool)["choices"][0]["text"]
    asleep(pool, "large")
    os.kill(pool.large, signal.SIGKILL)
    card = pool.until("large", "failed", "cold")
    assert "SIGKILL" in card["reason"]
    assert answered(pool)["choices"][0]["text"] == text


@pytest.mark.parametrize("how", ["unload", "sleep"])
def test_cached_prefixes_come_back_from_the_disk(pool, how):
    def cached() -> int:
        usage = answered(pool, "chat")["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)

    cached()
    most = cached()
    assert most >= 32
    answer = pool.client.post(f"/models/{how}", json={"model": "chat"})
    assert answer.status_code == 200, answer.text
    assert pool.state("chat") in ("cold", "asleep")
    assert cached() == most


def test_figures_tell_the_sleep(pool):
    answered(pool)
    asleep(pool, "large")
    text = pool.client.get("/metrics").text
    assert 'toolkit_lm_pool_model_state{model_name="large",state="asleep"} 1.0' in text
    [sleeps] = [
        line
        for line in text.splitlines()
        if line.startswith('toolkit_lm_pool_sleeps_total{model_name="large"}')
    ]
    assert float(sleeps.split()[-1]) >= 1
