"""An adapter for each request, by a third party's part: as with merged weights, in few slots."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.events import LoadEvent, RequestEvent
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm_devkit import PartConformance
from toolkit_lm_server.app import create_app

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "lora_like"))
LORA = importlib.import_module("toolkit_lm_lora_like")
PROMPT = [(37 * i) % 250 + 16 for i in range(33)]
LAYERS = ("self_attn.o_proj", "mlp.down_proj")
NAMES = ("red", "green", "blue")


EVENTS = []


class Watches:
    name = "watches"

    @hookimpl
    def toolkit_event(self, event):
        EVENTS.append(event)


@pytest.fixture(scope="module")
def adapters(make_llama, tmp_path_factory):
    """(checkpoint, folder of adapters, the tokens that each gives)."""
    checkpoint, model = make_llama("lora")
    folder = tmp_path_factory.mktemp("adapters")
    expected = {None: reference(model)}
    for seed, name in enumerate(NAMES):
        tensors = adapter(model, seed)
        save_file(tensors, folder / f"{name}.safetensors")
        expected[name] = merged(model, tensors)
    assert len(set(map(tuple, expected.values()))) == 4
    return str(checkpoint), folder, expected


def adapter(model, seed):
    torch.manual_seed(seed)
    tensors = {}
    for index in range(model.config.num_hidden_layers):
        for layer in LAYERS:
            name = f"model.layers.{index}.{layer}"
            outputs, inputs = model.get_submodule(name).weight.shape
            tensors[f"{name}.lora_A"] = torch.randn(4, inputs) * 0.3
            tensors[f"{name}.lora_B"] = torch.randn(outputs, 4) * 0.3
    return tensors


def reference(model):
    with torch.no_grad():
        found = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )
    return found[0, len(PROMPT) :].tolist()


def merged(model, tensors):
    names = {key.rpartition(".")[0] for key in tensors}
    before = {name: model.get_submodule(name).weight.detach().clone() for name in names}
    with torch.no_grad():
        for name in names:
            delta = tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
            model.get_submodule(name).weight += delta
        found = reference(model)
        for name, weight in before.items():
            model.get_submodule(name).weight.copy_(weight)
    return found


def options(folder, num_slots=2, **others):
    return {
        "plugins": [LORA],
        "plugin_option": {LORA.__name__: {"folder": str(folder), "num_slots": num_slots}},
        "num_kv_blocks": 256,
        "block_size": 4,
        "max_model_len": 128,
        "dtype": "float32",
        **others,
    }


def params(name):
    given = {} if name is None else {"extra_args": {"lora": name}}
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **given)


def ask(llm, *names):
    prompts = [{"prompt_token_ids": PROMPT}] * len(names)
    return llm.generate(prompts, [params(name) for name in names], use_tqdm=False)


def tokens(output):
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def llm(adapters):
    checkpoint, folder, _ = adapters
    with LLM(checkpoint, **options(folder) | {"plugins": [LORA, Watches()]}) as made:
        yield made


def test_rows_of_one_batch_have_adapters_of_their_own(llm, adapters):
    expected = adapters[2]
    names = (None, "red", "green", "red", None)
    found = ask(llm, *names)
    assert [tokens(one) for one in found] == [expected[name] for name in names]


def test_more_adapters_than_slots(llm, adapters):
    expected = adapters[2]
    names = (*NAMES, None, *reversed(NAMES))
    EVENTS.clear()
    found = ask(llm, *names)
    assert [tokens(one) for one in found] == [expected[name] for name in names]
    waits = {one.waited_for for one in EVENTS if isinstance(one, RequestEvent)}
    assert {"lora: is loading", "lora: no slot"} & waits
    loads = [one for one in EVENTS if isinstance(one, LoadEvent)]
    assert any(one.waiting_by_reason.get("part") for one in loads)


def test_no_adapter_reads_the_prefix_of_another(llm, adapters):
    expected = adapters[2]
    llm.engine.reset_prefix_cache()
    for cached in (0, 32):
        for name in (None, *NAMES):
            [found] = ask(llm, name)
            assert (tokens(found), found.num_cached_tokens) == (expected[name], cached)


def test_adapters_come_and_go(llm, adapters):
    _, folder, expected = adapters
    file = folder / "new.safetensors"
    with pytest.raises(RequestError, match=r"no adapter 'new'\. There are: blue, green, red\."):
        ask(llm, "new")
    for name in ("red", "green"):
        file.write_bytes((folder / f"{name}.safetensors").read_bytes())
        assert tokens(ask(llm, "new")[0]) == expected[name]
    save_file({"nowhere.lora_A": torch.ones(1, 1)}, file)
    bad, good = ask(llm, "new", "red")
    assert "plugin 'toolkit_lm_lora_like'" in bad.error
    assert "the model has no layer 'nowhere'" in bad.error
    assert tokens(good) == expected["red"]
    file.unlink()
    with pytest.raises(RequestError, match="no adapter 'new'"):
        ask(llm, "new")


class TestPart(PartConformance):
    part = "lora"
    plugins = (LORA,)
    shares = ({"lora": "red"}, {"lora": "green"}, {"lora": "blue"})

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, adapters):
        return adapters[0]

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, adapters):
        return {"plugin_option": options(adapters[1])["plugin_option"]}


def planted(monkeypatch, half, method, replacement):
    """The kit, whose plugin has a fault."""
    kind = Plugins.load(extra=[LORA]).parts.load_half("lora", half)
    monkeypatch.setattr(kind, method, replacement)
    return TestPart()


def given_of(adapters):
    return adapters[0], {"plugin_option": options(adapters[1])["plugin_option"]}


def test_adapters_that_share_prefixes_are_found(adapters, monkeypatch):
    kind = Plugins.load(extra=[LORA]).parts.load_half("lora", "request")
    prepare = kind.prepare
    kit = TestPart()
    given = given_of(adapters)
    with kit.llm(*given, enable_prefix_caching=False) as llm:
        alone = [kit.ask(llm, [one])[0] for one in kit.requests()]
    monkeypatch.setattr(kind, "prepare", lambda *all_: (prepare(*all_)[0], []))
    with pytest.raises(AssertionError, match="others than alone"):
        kit.test_tokens_do_not_depend_on_the_company(*given, alone, {})


def test_a_part_that_forgets_nothing_is_found(adapters, monkeypatch):
    kit = planted(monkeypatch, "worker", "remove", lambda part, seq_id: None)
    with pytest.raises(AssertionError, match=r"sequences that have left: _digests from \d+ to"):
        kit.test_sequences_that_have_left_are_forgotten(*given_of(adapters), monkeypatch)


@pytest.mark.anyio
async def test_adapters_over_http(adapters):
    checkpoint, folder, expected = adapters
    given = options(folder, 1)
    plugins = Plugins.load(
        PluginsConfig(plugin_option=given.pop("plugin_option")), extra=given.pop("plugins")
    )
    config = VllmConfig.make(model=checkpoint, engine_process=False, **given)
    llm = AsyncLLM(config=config, plugins=plugins)
    try:
        await llm.wait_ready()
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            body["return_token_ids"] = True
            for name in ("red", "blue"):
                answer = await client.post("/v1/completions", json={**body, "lora": name})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected[name]
            answer = await client.post("/v1/completions", json={**body, "lora": "none"})
            assert answer.status_code == 400 and "no adapter 'none'" in answer.text
    finally:
        llm.close()
