"""Errors in a plugin's code name the plugin, wherever the engine meets them: distribution, file and
line, cause, chained."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import types
import warnings

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import CheckpointRegistry, Plugins, PluginWarning, hookimpl
from toolkit_lm.plugin.registries import by_hook
from toolkit_lm.step import StepPart
from toolkit_lm_cli import run
from toolkit_lm_cli.explanation import explain
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_renderer_hf.renderer import HfRenderer
from toolkit_lm_sdpa.backend import SdpaBackend

NAMED = rf"plugin 'failing' \(given from code, {re.escape(__file__)}:\d+\) failed in "
SMALL = {"max_model_len": 64, "num_kv_blocks": 16}


def failing(*names: str) -> dict[str, object]:
    """Methods that raise."""

    def boom(self, *args, **kwargs):
        raise RuntimeError("boom")

    return dict.fromkeys(names, boom)


def backend(*names: str) -> type:
    methods = failing(*names)
    return type(
        "Failing",
        (SdpaBackend,),
        {name: classmethod(m) if name in CLASSMETHODS else m for name, m in methods.items()},
    )


CLASSMETHODS = ("refuses", "page_layout", "graphs")


class Failing:
    """A plugin with one target, under one name."""

    name = "failing"

    def __init__(self, what: str, target: type, key: str = "failing", **fields) -> None:
        self.what = what
        self.key = key
        self.fields = fields
        sys.modules["failing_target"] = types.SimpleNamespace(target=target)

    def add(self, what: str, registry) -> None:
        if what == self.what:
            registry.add(self.key, "failing_target:target", **self.fields)

    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        self.add("backend", backends)

    @hookimpl
    def toolkit_register_models(self, models):
        self.add("model", models)

    @hookimpl
    def toolkit_register_renderers(self, renderers):
        self.add("renderer", renderers)


@pytest.fixture(autouse=True)
def forget():
    yield
    sys.modules.pop("failing_target", None)


@pytest.mark.parametrize("method", ["page_layout", "__init__", "build", "forward"])
def test_a_backend_that_fails_while_the_engine_starts(method):
    plugin = Failing("backend", backend(method), priority=50)
    with pytest.raises(PluginError, match=NAMED + r".*boom: RuntimeError: boom") as caught:
        LLM("tiny", plugins=[plugin], **SMALL)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_backend_that_cannot_say_what_graphs_hold():
    plugin = Failing("backend", backend("graphs"), priority=50)
    with pytest.raises(
        PluginError, match=NAMED + r"graphs\(\) of attention backend 'failing': RuntimeError: boom"
    ):
        LLM("tiny", plugins=[plugin], **SMALL)


def test_a_backend_that_cannot_be_asked_is_passed_over():
    plugin = Failing("backend", backend("refuses"), priority=50)
    with pytest.warns(
        PluginWarning,
        match=NAMED + r"refuses\(\) of attention backend 'failing': RuntimeError: boom",
    ):
        llm = LLM("tiny", plugins=[plugin], **SMALL)
    assert llm.generate("a", SamplingParams(max_tokens=1))[0].finished
    with pytest.warns(PluginWarning, match="boom"):
        found = explain(VllmConfig.make(model="tiny"), [plugin])
    assert found.layers[0].backend != "failing" and re.match(
        NAMED, dict(found.layers[0].candidates)["failing"]
    )
    for start in (
        lambda: LLM("tiny", plugins=[plugin], attention_backend="failing", **SMALL),
        lambda: explain(WANTED, [plugin]),
    ):
        with pytest.raises(PluginError, match=NAMED + "refuses"):
            start()


WANTED = VllmConfig.make(model="tiny", attention_backend="failing")


@pytest.mark.parametrize("method", ["__init__", "forward", "compute_logits"])
def test_a_model_that_fails_while_the_engine_starts(method):
    plugin = Failing(
        "model",
        type("Failing", (LlamaForCausalLM,), failing(method)),
        "LlamaForCausalLM",
        override=True,
    )
    with pytest.raises(PluginError, match=NAMED + r".*boom: RuntimeError: boom") as caught:
        LLM("tiny", plugins=[plugin], **SMALL)
    assert ("from the config.json of" in str(caught.value)) == (method == "__init__")
    if method == "__init__":
        with pytest.raises(PluginError, match=NAMED + r".*boom: RuntimeError: boom"):
            explain(VllmConfig.make(model="tiny"), [plugin])


@pytest.mark.parametrize("method", ["__init__", "render_prompt"])
def test_a_renderer_that_fails(method):
    plugin = Failing("renderer", type("Failing", (HfRenderer,), failing(method)))
    with pytest.raises(PluginError, match=NAMED + r".*: RuntimeError: boom"):
        LLM("tiny", plugins=[plugin], renderer="failing", **SMALL).generate("a")


def test_a_step_that_fails_names_the_plugin_in_the_output():
    """The engine goes on: who asked for the step gets the error."""

    class Poisoned(LlamaForCausalLM):
        def forward(self, input_ids, positions, **inputs):
            if (input_ids == 7).any():
                raise RuntimeError("boom")
            return super().forward(input_ids, positions, **inputs)

    with LLM(
        "tiny", plugins=[Failing("model", Poisoned, "LlamaForCausalLM", override=True)], **SMALL
    ) as llm:
        good, bad = llm.generate(
            [{"prompt_token_ids": [5]}, {"prompt_token_ids": [7]}], SamplingParams(max_tokens=2)
        )
    assert good.error is None
    assert re.match(NAMED + r".*Poisoned.forward: RuntimeError: boom", bad.error)


class Wrong:
    """Errors of plugins without a line of theirs in the traceback: wrong arguments, and wrong
    results."""

    class Arguments(SdpaBackend):
        def __init__(self):
            pass

    class PageOfNothing(SdpaBackend):
        @classmethod
        def page_layout(cls, spec):
            return []

    class PageOfNone(SdpaBackend):
        @classmethod
        def page_layout(cls, spec):
            return None

    class PageWithoutSpec(SdpaBackend):
        @classmethod
        def page_layout(cls):
            return []


@pytest.mark.parametrize(
    "cls", [Wrong.Arguments, Wrong.PageOfNothing, Wrong.PageOfNone, Wrong.PageWithoutSpec]
)
def test_a_backend_that_is_wrong_without_raising_is_named(cls):
    with pytest.raises(
        PluginError, match=rf"{NAMED}Wrong\.{cls.__name__}: (TypeError|ValueError): "
    ):
        LLM("tiny", plugins=[Failing("backend", cls, priority=50)], **SMALL)


def test_the_part_of_a_model_that_cannot_be_made_is_named():
    class Part(StepPart):
        def __init__(self):
            pass

    model = type("Failing", (LlamaForCausalLM,), {"parts": {"part": Part}})
    with pytest.raises(PluginError, match=NAMED + r".*Part: TypeError"):
        LLM("tiny", plugins=[Failing("model", model, "LlamaForCausalLM", override=True)], **SMALL)


MODULES = {
    "import": "raise OSError('no licence')",
    "attribute": "",
    "constructor": (
        "class Target:\n    def __init__(self, *arguments):\n        raise OSError('no licence')\n"
    ),
    "arguments": "class Target:\n    def __init__(self, nobody, *, knows):\n        pass\n",
    "refuses": (
        "class Target:\n    @classmethod\n    def refuses(cls, *arguments):\n        raise "
        "OSError('no licence')\n"
    ),
}
"""Possible faults of the module of a target."""


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """shipped(entry module, target module): a distribution with a plugin, and the loaded
    plugins."""

    def make(entry: str, target: str = "") -> Plugins:
        metadata = tmp_path / "faulty_dist-2.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: faulty-dist\nVersion: 2.5\nRequires-Dist: "
            "toolkit-lm-core<0.3,>=0.2\n"
        )
        (metadata / "entry_points.txt").write_text("[toolkit_lm]\nfaulty = faulty_entry\n")
        (tmp_path / "faulty_entry.py").write_text(
            f"from toolkit_lm.plugin import hookimpl\n{entry}"
        )
        (tmp_path / "faulty_target.py").write_text(target)
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("faulty_entry", "faulty_target"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return Plugins.load()

    return make


REGISTRIES = {
    hook: registry
    for hook, registry in by_hook(Plugins.load()).items()
    if not isinstance(registry, CheckpointRegistry)
}
FIELDS = {
    "logits_processors": "'faulty_target:Target', params=ProcessorParams",
    "commands": "'faulty_target:Target', help='It fails.'",
    "parts": "planner='faulty_target:Target'",
}
"""Arguments of `add` after the name, by the end of the hook's name."""


@pytest.mark.parametrize("fault", MODULES)
@pytest.mark.parametrize("hook", REGISTRIES)
def test_each_registry_names_plugin_distribution_version_file_and_line(
    shipped, tmp_path, hook, fault
):
    """Whatever it is of a target that fails: its import, what is not there, its constructor, its
    class methods."""
    registry = REGISTRIES[hook]
    (argument,) = inspect.signature(getattr(Plugins.load().hook, hook).spec.function).parameters
    usual = "'faulty_target:Target'"
    fields = FIELDS.get(argument, FIELDS.get(hook.removeprefix("toolkit_register_"), usual))
    entry = (
        f"from toolkit_lm.param_spec import ProcessorParams\n@hookimpl\ndef {hook}({argument}):\n"
        f"    {argument}.add('faulty', {fields})\n"
    )
    plugins = shipped(entry, MODULES[fault])
    of_plugin = by_hook(plugins)[hook]
    named = (
        rf"plugin 'faulty' \(faulty-dist 2\.5, {re.escape(str(tmp_path))}/faulty_(target|entry)\.py"
    )
    if fault == "refuses":
        with (
            pytest.warns(PluginWarning, match=named) if registry.base else contextlib.nullcontext()
        ):
            if registry.base:
                assert re.match(named, of_plugin.ask("faulty", None) or "")
        return
    with pytest.raises(PluginError, match=named) as caught:
        of_plugin.make("faulty", 1, 2, 3)
    if fault == "import":
        assert re.search(r"faulty_target\.py:1\)", str(caught.value))
    if fault in ("constructor", "arguments") and registry.base == "":
        assert re.search(r"faulty_target\.py:[123]\)", str(caught.value))


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        ("'Nowhere'", "NameError: name 'Nowhere' is not defined"),
        ("lambda: 0", "TypeError|not supported"),
    ],
)
@pytest.mark.parametrize("kind", ["msgspec.Struct", "dataclass"])
def test_options_with_a_wrong_annotation(shipped, tmp_path, kind, annotation, reason):
    base, above = (
        ("", "@dataclasses.dataclass\n") if kind == "dataclass" else ("(msgspec.Struct)", "")
    )
    entry = (
        f"import dataclasses, msgspec\n{above}class Options{base}:\n    size: {annotation} = 1\n"
    )
    with pytest.warns(PluginWarning, match=r"plugin 'faulty' \(faulty-dist 2\.5, ") as caught:
        plugins = shipped(entry)
    assert plugins.info("faulty").status == "broken"
    [message] = [str(one.message) for one in caught if "faulty" in str(one.message)]
    assert re.search(
        rf"Options \({re.escape(str(tmp_path))}/faulty_entry\.py:\d+\) cannot be made: "
        rf".*({reason})",
        message,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run(["plugins", "list"]) == 0
