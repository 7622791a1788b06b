"""Every hook of core does what its page says: the pages' own examples are the plugins."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.engine import EngineClient, start_engine
from toolkit_lm.errors import CheckpointError, ConfigError, PluginError
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.model import (
    ParallelLMHead,
    ReplicatedLinear,
    RMSNorm,
    UnquantizedMethod,
    construction,
)
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.pooling import PoolingInputs
from toolkit_lm.renderer import AnswerDelta, RenderedText

PAGES = Path(__file__).parents[3] / "docs" / "hooks"


def page_example(page: Path, block: int = 2) -> str:
    """A Python block of a hook's page, by default the second."""
    return page.read_text(encoding="utf-8").split("```python\n")[block].split("```")[0]


@pytest.fixture
def example(request, monkeypatch):
    """The example on the page of the hook that the test is named after, as a module."""
    hook = request.function.__name__.removeprefix("test_")
    module = types.ModuleType(f"{hook}_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(page_example(PAGES / f"{hook}.md"), module.__dict__)
    return module


def load(*plugins):
    return Plugins.load(PluginsConfig(plugins=[]), extra=plugins)


def test_toolkit_register_hookspecs(example):
    class Greets:
        name = "greets"

        @hookimpl
        def toolkit_greeting(self, name):
            return f"hello {name}"

    assert load(Greets(), example).hook.toolkit_greeting(name="you") == ["hello you"]


def test_the_page_of_toolkit_register_hookspecs_shows_a_registry():
    shown = types.ModuleType("greetings_example")
    exec(page_example(PAGES / "toolkit_register_hookspecs.md", block=3), shown.__dict__)

    class Brings:
        name = "brings"

        @hookimpl
        def toolkit_register_hookspecs(self):
            return shown

    class Greets:
        def __init__(self, name, *languages):
            self.name = name
            self.languages = languages

        @hookimpl
        def toolkit_register_greetings(self, greetings):
            for language in self.languages:
                greetings.add(language, f"{self.name}:greet")

    plugins = load(Greets("first", "de", "fr"), Brings(), Greets("second", "it"))
    registry = plugins.brought_registry(shown.GreetingRegistry)
    assert [(entry.key, entry.plugin, entry.target) for entry in registry.entries()] == [
        ("de", "first", "first:greet"),
        ("fr", "first", "first:greet"),
        ("it", "second", "second:greet"),
    ]
    with pytest.raises(
        PluginError, match="greeting 'es' cannot be added: plugins add to a registry in their"
    ):
        registry.add("es", "late:greet")
    with pytest.raises(
        PluginError, match=r"greeting 'de' is registered by .*'first'.* and by .*'second'"
    ):
        load(Brings(), Greets("first", "de"), Greets("second", "de"))
    with pytest.raises(PluginError, match="no loaded plugin brings a GreetingRegistry"):
        load().brought_registry(shown.GreetingRegistry)


def test_toolkit_register_models(example):
    entry = load(example).models.get("MyForCausalLM")
    assert (entry.target, entry.plugin, entry.runner) == (
        "toolkit_lm_mine.model:MyForCausalLM",
        example.__name__,
        "generate",
    )


def test_the_page_of_toolkit_register_models_shows_a_fallback():
    module = types.ModuleType("fallback_example")
    exec(page_example(PAGES / "toolkit_register_models.md", block=4), module.__dict__)
    models = load(module).models
    assert (models.fallbacks(), models.architectures()) == (["mine"], [])
    assert models.get("mine").is_fallback


def test_toolkit_register_attention_backends(example):
    assert load(example).attention_backends.get("mine").priority == 50


def test_toolkit_register_executors(example):
    executors = load(example).executors
    assert executors.get("mine").max_ranks == 8
    assert executors.keys() == ["in_process", "mine"]


def test_toolkit_register_kv_kinds(example):
    assert load(example).kv_kinds.get("recurrent").target == "toolkit_lm_mine.spec:RecurrentSpec"


def test_toolkit_register_kv_tiers(example):
    entry = load(example).kv_tiers.get("mine")
    assert (entry.target, entry.scheduler) == (
        "toolkit_lm_mine.store:MyStore",
        "toolkit_lm_mine.tier:MyTier",
    )


def test_toolkit_register_renderers(example):
    assert load(example).renderers.get("mine").reads == ("my_vocab.txt",)


def test_toolkit_register_logits_processors(example):
    processors = load(example).logits_processors
    entry = processors.get("no_echo")
    assert (entry.target, entry.plugin) == ("toolkit_lm_mine.no_echo:NoEcho", example.__name__)
    assert processors.parse({"no_echo_penalty": 2})["no_echo"].prepare(None) == {"penalty": 2}
    assert processors.parse({"no_echo_penalty": 0})["no_echo"].prepare(None) is None


def test_toolkit_register_parsers(example):
    parsers = load(example).parsers
    assert parsers.get("mine").target == "toolkit_lm_mine.formats:MyFormat"
    shown = types.ModuleType("toolkit_lm_mine.formats")
    exec(page_example(PAGES / "toolkit_register_parsers.md", block=3), shown.__dict__)
    assert shown.MyFormat.refuses("Think on the first line.") is None
    assert shown.MyFormat.refuses("Think not.") is not None
    parser = shown.MyFormat("").parser("", [])
    assert [parser.push(text) for text in ("a", "b\nc", "d\n")] == [
        AnswerDelta("", "a"),
        AnswerDelta("c", "b"),
        AnswerDelta("d\n", ""),
    ]


HALVES = """
from toolkit_lm.processing import RequestHalf
from toolkit_lm.scheduler import Planner

class Requests(RequestHalf): pass
class Plans(Planner): pass
def is_tiny(config): return config.model.model == "tiny"
def fails(config): raise KeyError("no such thing")
"""


def test_toolkit_register_parts(example, monkeypatch):
    parts = load(example).parts
    entry = parts.get("tenant")
    assert (list(entry.halves), entry.for_model) == (
        ["request", "planner"],
        "toolkit_lm_mine.front:is_for",
    )
    assert entry.shown == (
        "request toolkit_lm_mine.front:TenantRequests, "
        "planner toolkit_lm_mine.planner:TenantPlanner"
    )
    # Nothing is imported before it is needed.
    with pytest.raises(PluginError, match=r"loading part 'tenant' from 'toolkit_lm_mine.planner"):
        parts.load_half("tenant", "planner")


class Brings:
    name = "brings"

    def __init__(self, **halves):
        self.halves = halves

    @hookimpl
    def toolkit_register_parts(self, parts):
        parts.add("one", **self.halves)


def test_parts_are_used_where_they_have_a_half_and_are_for_the_model(monkeypatch):
    module = types.ModuleType("part_halves")
    exec(HALVES, module.__dict__)
    monkeypatch.setitem(sys.modules, "part_halves", module)
    halves = {"request": "part_halves:Requests", "planner": "part_halves:Plans"}
    tiny = VllmConfig.make(model="tiny")
    other = VllmConfig.make(model="other")
    parts = load(Brings(**halves, for_model="part_halves:is_tiny")).parts
    assert [one.key for one in parts.used("planner", tiny)] == ["one"]
    assert not parts.used("planner", other) and not parts.used("worker", tiny)
    assert isinstance(parts.make_half("one", "request", tiny, options=None), module.Requests)
    assert parts.load("one") is module.Plans
    with pytest.raises(PluginError, match=r"'brings'.*failed in for_model of part 'one': KeyError"):
        load(Brings(**halves, for_model="part_halves:fails")).parts.used("planner", tiny)
    with pytest.raises(PluginError, match=r"must be a subclass of toolkit_lm.scheduler.Planner"):
        load(Brings(planner="part_halves:Requests")).parts.load_half("one", "planner")


@pytest.mark.parametrize(
    ("halves", "message"),
    [
        ({}, "part 'one' has no half: give request, planner or worker"),
        ({"worker": "nothing"}, "the target of part 'one' must be a text 'module:Class'"),
        ({"worker": "a:B", "for_model": 3}, "the target of part 'one' must be a text"),
    ],
)
def test_a_malformed_part_is_refused_by_name(halves, message):
    with pytest.raises(PluginError, match=rf"'brings'.*{message}"):
        load(Brings(**halves))


def test_toolkit_register_scheduling_policies(example):
    policies = load(example).scheduling_policies
    assert policies.keys() == ["fcfs", "priority", "shortest_first"]
    assert [entry.reads_priority for entry in policies.entries()] == [False, True, False]
    shown = types.ModuleType("toolkit_lm_mine.policy")
    exec(page_example(PAGES / "toolkit_register_scheduling_policies.md", block=3), shown.__dict__)
    assert shown.shortest_first(types.SimpleNamespace(num_prompt_tokens=3)) == (3,)


def test_toolkit_register_option_names(example, monkeypatch):
    names = load(example).option_names
    shown = types.ModuleType("toolkit_lm_mine.options")
    exec(page_example(PAGES / "toolkit_register_option_names.md", block=3), shown.__dict__)
    monkeypatch.setitem(sys.modules, "toolkit_lm_mine", types.ModuleType("toolkit_lm_mine"))
    monkeypatch.setitem(sys.modules, shown.__name__, shown)
    assert names.translate({"context_size": 64, "other": 1}) == {"max_model_len": 64, "other": 1}


def test_toolkit_register_pooling(example):
    entry = load(example).pooling.get("first_token")
    assert (entry.target, entry.plugin) == (
        "toolkit_lm_mine.first_token:as_first_token_model",
        example.__name__,
    )


def test_toolkit_register_pooling_profiles(example, tmp_path, monkeypatch):
    profiles = load(example).pooling_profiles
    assert profiles.get("mine").target == "toolkit_lm_mine.profile:read_profile"
    shown = types.ModuleType("toolkit_lm_mine.profile")
    exec(page_example(PAGES / "toolkit_register_pooling_profiles.md", block=3), shown.__dict__)
    monkeypatch.setitem(sys.modules, "toolkit_lm_mine", types.ModuleType("toolkit_lm_mine"))
    monkeypatch.setitem(sys.modules, shown.__name__, shown)
    assert profiles.read(tmp_path, {"hidden_size": 8}, tmp_path) is None
    (tmp_path / "my_pooling.json").write_text('{"longest": 64, "query_prompt": "Q: "}')
    profile = profiles.read(tmp_path, {"hidden_size": 8}, tmp_path)
    assert (profile.max_tokens, profile.details["prompts"], profile.details["pooling"]["size"]) == (
        64,
        {"query": "Q: "},
        8,
    )


def test_toolkit_register_pooling_inputs(example, monkeypatch):
    plugins = load(example)
    assert plugins.pooling_inputs.get("mine").target == "toolkit_lm_mine.inputs:make_inputs"
    shown = types.ModuleType("toolkit_lm_mine.inputs")
    exec(page_example(PAGES / "toolkit_register_pooling_inputs.md", block=3), shown.__dict__)
    monkeypatch.setitem(sys.modules, "toolkit_lm_mine", types.ModuleType("toolkit_lm_mine"))
    monkeypatch.setitem(sys.modules, shown.__name__, shown)
    renderer = types.SimpleNamespace(
        render_texts=lambda texts: [RenderedText([len(text)]) for text in texts]
    )
    made = plugins.pooling_inputs.first_result(
        PoolingInputs, VllmConfig.default({"architectures": ["MineForCausalLM"]}), renderer, plugins
    )
    assert made.render(["ab", "c"]) == [RenderedText([2]), RenderedText([1])]
    other = VllmConfig.default({"architectures": ["OtherForCausalLM"]})
    assert plugins.pooling_inputs.first_result(PoolingInputs, other, renderer, plugins) is None


def test_toolkit_register_engine_clients(example, monkeypatch):
    plugins = load(example)
    assert plugins.engine_clients.get("mine").target == "toolkit_lm_mine.start:start"
    shown = types.ModuleType("toolkit_lm_mine.start")
    exec(page_example(PAGES / "toolkit_register_engine_clients.md", block=3), shown.__dict__)
    made = types.ModuleType("toolkit_lm_mine.client")
    made.MyClient = type(
        "MyClient", (EngineClient,), {"__init__": lambda self, config, plugins: None}
    )
    made.MyClient.__abstractmethods__ = frozenset()
    for module in (types.ModuleType("toolkit_lm_mine"), shown, made):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert isinstance(start_engine(VllmConfig.make(data_parallel_size=2), plugins), made.MyClient)
    with pytest.raises(ConfigError, match="no loaded plugin runs several engines"):
        start_engine(VllmConfig.make(data_parallel_size=2), load())


def test_toolkit_register_checkpoints(example, tmp_path, monkeypatch):
    folder = tmp_path / "toolkit_lm_mine" / "checkpoint"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert load(example).checkpoints.path("mine") == folder


def test_toolkit_register_loaders(example, tmp_path):
    loaders = load(example).loaders
    assert loaders.keys() == ["npz"]
    shown = types.ModuleType("toolkit_lm_mine.npz")
    exec(page_example(PAGES / "toolkit_register_loaders.md", block=3), shown.__dict__)
    assert loaders.reading(tmp_path) is None
    weights = {"a": torch.randn(2, 3), "b": torch.arange(4)}
    np.savez(tmp_path / "weights.npz", **{name: tensor.numpy() for name, tensor in weights.items()})
    assert loaders.reading(tmp_path) == loaders.reading(tmp_path / "weights.npz") == "npz"
    found = dict(shown.NpzLoader(tmp_path))
    assert found.keys() == weights.keys() and all(
        torch.equal(found[name], weights[name]) for name in weights
    )
    (tmp_path / "weights.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"weights\.npz cannot be read"):
        dict(shown.NpzLoader(tmp_path))


def test_toolkit_register_quantization(example):
    assert load(example).quantization.get("halved").target == "toolkit_lm_mine.halved:Halved"
    shown = types.ModuleType("toolkit_lm_mine.halved")
    exec(page_example(PAGES / "toolkit_register_quantization.md", block=3), shown.__dict__)
    config = VllmConfig.default()
    assert shown.Halved.refuses(config) is None
    assert "16 bits already" in shown.Halved.refuses(VllmConfig.default(dtype="bfloat16"))
    with construction(quantization=shown.Halved(config)):
        layer = ReplicatedLinear(8, 4, vllm_config=config, prefix="layer")
        head = ParallelLMHead(10, 8, vllm_config=config, prefix="lm_head")
    assert isinstance(head.method, UnquantizedMethod)
    weight = torch.randn(4, 8)
    x = torch.randn(3, 8)
    layer.weight.weight_loader(layer.weight, weight)
    assert layer.weight.dtype == torch.float16
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight.half().float()))


def test_toolkit_register_compilers(example):
    compilers = load(example).compilers
    assert (compilers.get("mine").target, compilers.get("mine").priority) == (
        "toolkit_lm_mine.compiler:MyCompiler",
        5,
    )
    shown = types.ModuleType("toolkit_lm_mine.compiler")
    exec(page_example(PAGES / "toolkit_register_compilers.md", block=3), shown.__dict__)
    assert (
        shown.MyCompiler.refuses(VllmConfig.default(tensor_parallel_size=2))
        == "it traces models of one rank"
    )
    model = torch.nn.Linear(2, 2)
    compiler = shown.MyCompiler(model, VllmConfig.default(), None)
    assert torch.equal(compiler(torch.ones(3, 2)), model(torch.ones(3, 2)))
    compiler.seal()


def test_toolkit_register_kernels(example):
    kernels = load(example).kernels
    assert (kernels.get("mine").target, kernels.get("mine").priority) == (
        "toolkit_lm_mine.kernels:MyKernels",
        5,
    )
    shown = types.ModuleType("toolkit_lm_mine.kernels")
    exec(page_example(PAGES / "toolkit_register_kernels.md", block=3), shown.__dict__)
    assert shown.MyKernels.refuses(VllmConfig.default()) is None
    assert (
        shown.MyKernels.refuses(VllmConfig.default().replace(device="meta")) == "it is for the CPU"
    )
    config = VllmConfig.default()
    x = torch.randn(3, 8)
    residual = torch.randn(3, 8)
    with construction(kernels=shown.MyKernels()):
        ours = RMSNorm(8, eps=1e-5, vllm_config=config)
    plain = RMSNorm(8, eps=1e-5, vllm_config=config)
    for norm in (ours, plain):
        torch.nn.init.ones_(norm.weight)
    torch.testing.assert_close(ours(x, residual), plain(x, residual))
    assert isinstance(ours.kernels, shown.MyKernels)


def test_toolkit_configure(example):
    plugins = load(example)
    assert plugins.configure(VllmConfig.make(device="cpu")).cache.block_size == 32
    assert plugins.configure(VllmConfig.make(device="cuda")) == VllmConfig.make(device="cuda")


def test_toolkit_event(example):
    plugins = load(example)
    plugins.event(StepEvent(time=0, duration=0.25, num_tokens=1))
    times = {"time": 0, "arrival_time": 0}
    for tenant, tokens, kind in (
        ("a", 1, "first_token"),
        ("a", 5, "finished"),
        ("b", 2, "aborted"),
    ):
        plugins.event(
            RequestEvent(
                kind=kind,
                request_id="1",
                num_prompt_tokens=3,
                num_output_tokens=tokens,
                context={"tenant": tenant},
                **times,
            )
        )
    assert (example.busy, example.tokens) == ([0.25], {"a": 5, "b": 2})


def test_toolkit_watch(example, capsys):
    first = {"kind": "first_token", "request_id": "1", "num_prompt_tokens": 3, "arrival_time": 0}
    config = PluginsConfig(plugins=[], plugin_option={example.__name__: {"slow": 1}})
    plugins = Plugins.load(config, extra=[example])
    assert not plugins.has_event_listeners
    for model in ("mine", "yours"):
        plugins.watch(VllmConfig.make(model=model))
        assert plugins.has_event_listeners
        plugins.event(RequestEvent(time=2, **first))
        plugins.event(RequestEvent(time=0.5, **first))
        plugins.close()
        assert not plugins.has_event_listeners
    plugins.close()
    assert capsys.readouterr().out == "mine: 1 slow requests\nyours: 1 slow requests\n"
