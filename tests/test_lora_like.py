"""An adapter for each request, by a third party's part: as with merged weights, in few slots."""

from __future__ import annotations

import asyncio
import copy
import importlib
import shutil
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import moe_families
import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm.events import LoadEvent, RequestEvent
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm_devkit import PartConformance
from toolkit_lm_server.app import create_app

FOLDER = Path(__file__).parent / "plugins"
for plugin in ("lora_like", "threads"):
    sys.path.insert(0, str(FOLDER / plugin))
LORA = importlib.import_module("toolkit_lm_lora_like")
THREADS = importlib.import_module("toolkit_lm_threads")
PROMPT = [(37 * i) % 250 + 16 for i in range(33)]
ATTENTION = [f"self_attn.{one}_proj" for one in "qkvo"]
FEED_FORWARD = [f"mlp.{one}_proj" for one in ("gate", "up", "down")]
LAYERS = {
    "red": [*ATTENTION, *FEED_FORWARD, "lm_head"],
    "green": ["self_attn.k_proj", "mlp.up_proj", "lm_head"],
    "blue": ["self_attn.o_proj", "mlp.down_proj"],
}
NAMES = tuple(LAYERS)


EVENTS = []


class Watches:
    name = "watches"

    @hookimpl
    def toolkit_event(self, event):
        EVENTS.append(event)


@pytest.fixture(scope="module")
def adapters(make_llama, tmp_path_factory):
    """(checkpoint, folder of adapters, what each gives)."""
    checkpoint, model = make_llama("like")
    folder = tmp_path_factory.mktemp("adapters")
    expected = {None: reference(model)}
    for seed, (name, layers) in enumerate(LAYERS.items()):
        tensors = adapter(model, seed, layers)
        save_file(tensors, folder / f"{name}.safetensors")
        expected[name] = merged(model, tensors)
    assert len({tuple(one.tokens) for one in expected.values()}) == 4
    return str(checkpoint), folder, expected


def adapter(model, seed, layers):
    torch.manual_seed(seed)
    named = [
        f"model.layers.{index}.{layer}"
        for index in range(model.config.num_hidden_layers)
        for layer in layers
        if layer != "lm_head"
    ]
    return deltas(model, named + [one for one in layers if one == "lm_head"])


def deltas(model, names):
    tensors = {}
    for name in names:
        outputs, inputs = model.get_submodule(name).weight.shape
        tensors[f"{name}.lora_A"] = torch.randn(4, inputs) * 0.1
        tensors[f"{name}.lora_B"] = torch.randn(outputs, 4) * 0.1
    return tensors


def reference(model, dtype=torch.float64):
    """(tokens, [tokens, V] their log probabilities)"""
    exact = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        ids = exact.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )
        logits = exact(ids).logits[0, len(PROMPT) - 1 : -1]
    return Reference(ids[0, len(PROMPT) :].tolist(), logits.log_softmax(-1))


class Reference(NamedTuple):
    tokens: list[int]
    logprobs: torch.Tensor


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


def options(folder, num_slots=2, adapters=NAMES, **others):
    return {
        "plugins": [LORA],
        "plugin_option": {
            LORA.__name__: {
                "folder": str(folder),
                "num_slots": num_slots,
                "adapters": list(adapters),
            }
        },
        "num_kv_blocks": 256,
        "block_size": 16,
        "max_model_len": 128,
        "dtype": "float32",
        **others,
    }


def params(name):
    given = {} if name is None else {"extra_args": {"like": name}}
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, **given)


def ask(llm, *names):
    prompts = [{"prompt_token_ids": PROMPT}] * len(names)
    return llm.generate(prompts, [params(name) for name in names], use_tqdm=False)


def tokens(output):
    return list(output.outputs[0].token_ids)


def given(output):
    """Tokens, and what the likeliest had at each."""
    return tokens(output), [
        {token: one.logprob for token, one in step.items()} for step in output.outputs[0].logprobs
    ]


def assert_is(output, expected):
    assert not output.error
    assert tokens(output) == expected.tokens
    for step, logprobs in zip(output.outputs[0].logprobs, expected.logprobs, strict=True):
        for token, one in step.items():
            assert abs(one.logprob - float(logprobs[token])) <= 1e-5


@pytest.fixture(scope="module")
def llm(adapters):
    checkpoint, folder, _ = adapters
    with LLM(checkpoint, **options(folder) | {"plugins": [LORA, Watches()]}) as made:
        yield made


def test_rows_of_one_batch_have_adapters_of_their_own(llm, adapters):
    expected = adapters[2]
    alone = {name: given(ask(llm, name)[0]) for name in (None, "red", "green")}
    names = (None, "red", "green", "red", None)
    llm.engine.reset_prefix_cache()
    for name, found in zip(names, ask(llm, *names), strict=True):
        assert_is(found, expected[name])
        assert given(found) == alone[name], f"{name}: others than alone, bit for bit"


def test_more_adapters_than_slots(llm, adapters):
    expected = adapters[2]
    names = (*NAMES, None, *reversed(NAMES))
    EVENTS.clear()
    found = ask(llm, *names)
    assert [tokens(one) for one in found] == [expected[name].tokens for name in names]
    waits = {one.waited_for for one in EVENTS if isinstance(one, RequestEvent)}
    assert {"like: is loading", "like: no slot"} & waits
    loads = [one for one in EVENTS if isinstance(one, LoadEvent)]
    assert any(one.waiting_by_reason.get("part") for one in loads)


def test_no_adapter_reads_the_prefix_of_another(llm, adapters):
    expected = adapters[2]
    llm.engine.reset_prefix_cache()
    for cached in (0, 32):
        for name in (None, *NAMES):
            [found] = ask(llm, name)
            assert (tokens(found), found.num_cached_tokens) == (expected[name].tokens, cached)


def test_adapters_come_and_go(llm, adapters):
    _, folder, expected = adapters
    file = folder / "new.safetensors"
    with pytest.raises(RequestError, match=r"no adapter 'new'\. There are: blue, green, red\."):
        ask(llm, "new")
    for name in ("red", "green"):
        # The prefix that it had under its name is another's.
        file.write_bytes((folder / f"{name}.safetensors").read_bytes())
        assert llm.call_workers("like.load_adapter", "new", str)
        assert tokens(ask(llm, "new")[0]) == expected[name].tokens
    llm.call_workers("like.unload_adapter", "new")
    with pytest.raises(ToolkitError, match=r"no adapter 'new' is loaded\. Loaded are: blue, green"):
        llm.call_workers("like.unload_adapter", "new")
    for bad, why in (
        ({"nowhere.lora_A": torch.ones(1, 1)}, "the model has no layer 'nowhere'"),
        (
            {"lm_head.lora_A": torch.ones(1, 3), "lm_head.lora_B": torch.ones(272, 1)},
            "change no layer of 64 inputs and 272 outputs",
        ),
    ):
        save_file(bad, file)
        with pytest.raises(ToolkitError, match=why) as raised:
            llm.call_workers("like.load_adapter", "new")
        assert "plugin 'toolkit_lm_lora_like'" in str(raised.value)
        assert tokens(ask(llm, "red")[0]) == expected["red"].tokens
    file.unlink()


@pytest.mark.anyio
async def test_a_request_waits_until_its_adapter_is_loaded(adapters):
    checkpoint, folder, expected = adapters
    EVENTS.clear()
    async with made(checkpoint, folder, adapters=["green"], watched=True) as llm:

        async def asked(name):
            prompt = {"prompt_token_ids": PROMPT}
            async for output in llm.generate(prompt, params(name)):
                last = output
            return last

        waiting = asyncio.create_task(asked("red"))
        assert_is(await asked("green"), expected["green"])
        await asyncio.sleep(0.05)
        assert not waiting.done()
        [digest] = await llm.call_workers("like.load_adapter", "red", str)
        assert len(digest) == 64
        assert_is(await waiting, expected["red"])
        waits = {one.waited_for for one in EVENTS if isinstance(one, RequestEvent)}
        assert waits & {"like: red is not loaded yet", "like: is loading"}
        await llm.call_workers("like.unload_adapter", "red")
        # The planner hears of it in the next step.
        assert_is(await asked("green"), expected["green"])
        assert "'red' was unloaded" in (await asked("red")).error
        await llm.call_workers("like.load_adapter", "red")
        assert_is(await asked("green"), expected["green"])
        assert_is(await asked("red"), expected["red"])


def test_two_ranks_have_a_share_each(adapters):
    checkpoint, folder, expected = adapters
    names = (None, *NAMES, "red")
    given = options(folder, 3, executor="threads", tensor_parallel_size=2)
    with LLM(checkpoint, **given | {"plugins": [LORA, THREADS]}) as llm:
        for name, found in zip(names, ask(llm, *names), strict=True):
            assert_is(found, expected[name])
        assert len(set(llm.call_workers("like.load_adapter", "red", str))) == 1


EXECUTORS = ["mp", pytest.param("ray", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ranks_that_are_processes(adapters, install, executor):
    """Installed, so that they find the part: its front and planner are in this process."""
    checkpoint, folder, expected = adapters
    install("lora_like")
    names = (None, *NAMES, "red")
    given = options(folder, 3, executor=executor, tensor_parallel_size=2, device="cpu")
    del given["plugins"]
    # Under the name of its entry point.
    own = {"lora_like": given["plugin_option"][LORA.__name__]}
    if executor == "ray":
        own["executor_ray"] = {"address": "local"}
    with LLM(checkpoint, **given | {"plugin_option": own}) as llm:
        for name, found in zip(names, ask(llm, *names), strict=True):
            assert_is(found, expected[name])
        assert len(set(llm.call_workers("like.load_adapter", "red", str))) == 1
        assert_is(ask(llm, "red")[0], expected["red"])


def test_one_expert_and_the_head(tmp_path):
    """An expert's layers are given its tokens alone."""
    model = moe_families.make_mixtral(vocab_size=272, max_position_embeddings=256)
    checkpoint = tmp_path / "mixtral"
    model.save_pretrained(checkpoint)
    written = load_file(checkpoint / "model.safetensors")
    torch.manual_seed(4)
    names = [one.removesuffix(".weight") for one in written if ".experts.1.w" in one]
    assert len(names) == 3 * model.config.num_hidden_layers
    tensors = {}
    for name in [*names, "lm_head"]:
        outputs, inputs = written[f"{name}.weight"].shape
        tensors[f"{name}.lora_A"] = torch.randn(4, inputs) * 0.1
        tensors[f"{name}.lora_B"] = torch.randn(outputs, 4) * 0.1
    save_file(tensors, tmp_path / "expert.safetensors")
    # Its grouped product takes no float64.
    expected = {None: reference(model, torch.float32)}
    for name in [*names, "lm_head"]:
        written[f"{name}.weight"] += tensors[f"{name}.lora_B"] @ tensors[f"{name}.lora_A"]
    other = shutil.copytree(checkpoint, tmp_path / "other")
    save_file(written, other / "model.safetensors", metadata={"format": "pt"})
    expected["expert"] = reference(type(model).from_pretrained(other).eval(), torch.float32)
    asked = (None, "expert", None, "expert")
    with LLM(str(checkpoint), **options(tmp_path, adapters=["expert"], renderer="tokens")) as llm:
        for name, found in zip(asked, ask(llm, *asked), strict=True):
            assert_is(found, expected[name])
    assert expected[None].tokens != expected["expert"].tokens


class TestPart(PartConformance):
    part = "like"
    plugins = (LORA,)
    shares = ({"like": "red"}, {"like": "green"}, {"like": "blue"})

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
    kind = Plugins.load(extra=[LORA]).parts.load_half("like", half)
    monkeypatch.setattr(kind, method, replacement)
    return TestPart()


def given_of(adapters):
    return adapters[0], {"plugin_option": options(adapters[1])["plugin_option"]}


def test_adapters_that_share_prefixes_are_found(adapters, monkeypatch):
    kind = Plugins.load(extra=[LORA]).parts.load_half("like", "request")
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


@asynccontextmanager
async def made(checkpoint, folder, watched=False, **own):
    given = options(folder, **own)
    extra = [*given.pop("plugins"), *([Watches()] if watched else [])]
    plugins = Plugins.load(PluginsConfig(plugin_option=given.pop("plugin_option")), extra=extra)
    config = VllmConfig.make(model=checkpoint, engine_process=False, **given)
    async with AsyncLLM(config=config, plugins=plugins) as llm:
        yield llm


@pytest.mark.anyio
async def test_adapters_over_http(adapters):
    checkpoint, folder, expected = adapters
    async with made(checkpoint, folder, num_slots=1) as llm:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            body["return_token_ids"] = True
            for name in ("red", "blue"):
                answer = await client.post("/v1/completions", json={**body, "like": name})
                assert answer.status_code == 200, answer.text
                assert answer.json()["choices"][0]["token_ids"] == expected[name].tokens
            answer = await client.post("/v1/completions", json={**body, "like": "none"})
            assert answer.status_code == 400 and "no adapter 'none'" in answer.text
