"""Registries: targets as text, duplicates, overrides, and errors that name the plugin."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from toolkit_lm.errors import CheckpointError, ConfigError, PluginError, UnsupportedError
from toolkit_lm.param_spec import ProcessorParams
from toolkit_lm.plugin import (
    AttentionBackendRegistry,
    CheckpointRegistry,
    ConverterRegistry,
    LogitsProcessorRegistry,
    ModelRegistry,
    PluginInfo,
    RendererRegistry,
)

ONE = PluginInfo("one", "dist-one", "1.0", "/somewhere/one.py")
TWO = PluginInfo("two", "dist-two", "2.0")


def test_an_entry_holds_what_was_said():
    models = ModelRegistry(owner=ONE)
    models.add("LlamaForCausalLM", "a.b:C", runner="pooling", renderer="hf")
    entry = models.get("LlamaForCausalLM")
    assert (entry.key, entry.target, entry.plugin, entry.runner, entry.renderer) == (
        "LlamaForCausalLM",
        "a.b:C",
        "one",
        "pooling",
        "hf",
    )
    assert (
        "LlamaForCausalLM" in models
        and list(models) == models.keys() == ["LlamaForCausalLM"]
        and models.entries() == [entry]
    )
    backends = AttentionBackendRegistry(owner=ONE)
    backends.add("fast", "a:B", priority=5)
    assert backends.get("fast").priority == 5
    renderers = RendererRegistry(owner=ONE)
    renderers.add("hf", "a:B", reads=("tokenizer.model",))
    assert renderers.get("hf").reads == ("tokenizer.model",)


def test_a_fallback_is_no_architecture():
    models = ModelRegistry(owner=ONE)
    models.add("X", "a:B")
    models.add_fallback("any", "a:C", runner="pooling", renderer="hf")
    entry = models.get("any")
    assert (entry.is_fallback, entry.target, entry.runner, entry.renderer) == (
        True,
        "a:C",
        "pooling",
        "hf",
    )
    assert not models.get("X").is_fallback
    models.add_fallback("sees", "a:D", length_keys=("n",), multimodal="a:Rules")
    assert (models.get("sees").multimodal, models.get("sees").length_keys) == ("a:Rules", ("n",))
    assert (models.architectures(), models.fallbacks()) == (["X"], ["any", "sees"])
    with pytest.raises(PluginError, match=r"'any' is registered by plugin 'one'"):
        models.copy(TWO).add_fallback("any", "c:D")


@pytest.mark.parametrize(
    "target", ["", "a", "a.b", "a:", ":a", "a b:c", "a:b:c", "a..b:c", "../a:b", "a:b()", None, 3]
)
def test_a_malformed_target_is_refused(target):
    with pytest.raises(
        PluginError, match=r"'one' .*target of model architecture 'X' must be a text 'module:Class'"
    ):
        ModelRegistry(owner=ONE).add("X", target)


@pytest.mark.parametrize("folder", ["a", "a:", "a:../b", "a:/b", "a:b/../c", "a:b//c", "a:.hidden"])
def test_a_checkpoint_folder_stays_inside_its_package(folder):
    with pytest.raises(PluginError, match=r"'package:folder'"):
        CheckpointRegistry(owner=ONE).add("x", folder)


@pytest.mark.parametrize("key", ["", " ", None])
def test_a_key_is_a_name(key):
    with pytest.raises(PluginError, match=r"needs a name"):
        ModelRegistry(owner=ONE).add(key, "a:B")


def test_a_closed_registry_takes_nothing():
    with pytest.raises(PluginError, match=r"'X' cannot be added"):
        ModelRegistry().add("X", "a:B")


def test_a_duplicate_names_both_plugins():
    models = ModelRegistry(owner=ONE)
    models.add("X", "a:B")
    with pytest.raises(
        PluginError,
        match=r"'X' is registered by plugin 'one' \(dist-one 1.0.* and by plugin 'two' "
        r"\(dist-two 2.0\)",
    ):
        models.copy(TWO).add("X", "c:D")


@pytest.mark.parametrize("first", [True, False])
def test_an_override_wins_from_either_side(first):
    models = ModelRegistry(owner=ONE)
    models.add("X", "a:B", override=first)
    models = models.copy(TWO)
    models.add("X", "c:D", override=not first)
    entry = models.get("X")
    assert entry.plugin == ("one" if first else "two")
    assert entry.replaced.plugin == ("two" if first else "one")


def test_two_overrides_are_an_error():
    models = ModelRegistry(owner=ONE)
    models.add("X", "a:B", override=True)
    with pytest.raises(PluginError, match=r"both say override=True"):
        models.copy(TWO).add("X", "c:D", override=True)


def test_a_copy_leaves_the_original_alone():
    models = ModelRegistry(owner=ONE)
    models.copy(TWO).add("X", "a:B")
    assert len(models) == 0


def test_an_unknown_key_names_the_nearest():
    models = ModelRegistry(owner=ONE)
    models.add("LlamaForCausalLM", "a:B")
    with pytest.raises(
        UnsupportedError,
        match=r"no model architecture 'LamaForCausalLM' is registered. Did you mean "
        r"'LlamaForCausalLM'",
    ):
        models.get("LamaForCausalLM")
    with pytest.raises(UnsupportedError, match=r"Install it."):
        models.copy(None, hint="Install it.").get("Bert")
    with pytest.raises(ConfigError, match=r"no attention backend 'x' is registered. Known: none."):
        AttentionBackendRegistry().get("x")


def test_load_imports_now_and_not_before(tmp_path, monkeypatch):
    (tmp_path / "late_target.py").write_text("class Outer:\n    class Inner: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    converters = ConverterRegistry(owner=ONE)
    converters.add("x", "late_target:Outer.Inner")
    assert "late_target" not in sys.modules
    assert converters.load("x").__name__ == "Inner"
    monkeypatch.delitem(sys.modules, "late_target")


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("no_such_module_here:X", ModuleNotFoundError),
        ("toolkit_lm.errors:Absent", AttributeError),
        ("raising_target:X", ZeroDivisionError),
    ],
)
def test_a_target_that_fails_names_its_plugin(tmp_path, monkeypatch, target, cause):
    (tmp_path / "raising_target.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    models = ModelRegistry(owner=ONE)
    models.add("X", target)
    place = (
        f"{tmp_path}/raising_target.py:1" if target.startswith("raising") else "/somewhere/one.py"
    )
    failure = (
        rf"'one' \(dist-one 1.0, {place}\) failed in loading model architecture 'X' from "
        rf"'{target}': {cause.__name__}"
    )
    with pytest.raises(PluginError, match=failure) as caught:
        models.load("X")
    assert isinstance(caught.value.__cause__, cause)
    assert caught.value.__cause__.__traceback__ is not None


def test_the_path_of_a_checkpoint(tmp_path, monkeypatch):
    package = tmp_path / "checkpoint_holder"
    (package / "inner" / "folder").mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise AssertionError('looking for a folder must not import the package')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    checkpoints = CheckpointRegistry(owner=ONE)
    checkpoints.add("tiny", "checkpoint_holder:inner/folder")
    checkpoints.add("lost", "checkpoint_holder:absent")
    checkpoints.add("nowhere", "no_such_package_here:folder")
    assert checkpoints.path("tiny") == Path(package, "inner", "folder")
    for name in ("lost", "nowhere"):
        with pytest.raises(CheckpointError, match=f"'one' .*checkpoint '{name}'"):
            checkpoints.path(name)
    with pytest.raises(ConfigError, match=r"no checkpoint 'tinny'.*'tiny'"):
        checkpoints.path("tinny")


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (ModelRegistry, "toolkit_lm.model.Model"),
        (AttentionBackendRegistry, "toolkit_lm.attention.AttentionBackend"),
        (RendererRegistry, "toolkit_lm.renderer.Renderer"),
        (LogitsProcessorRegistry, "toolkit_lm.sampling.LogitsProcessor"),
    ],
)
def test_a_target_must_be_what_its_registry_is_for(tmp_path, monkeypatch, kind, base):
    module = base.rpartition(".")[0]
    (tmp_path / "wrong_target.py").write_text(
        f"import {module}\nclass Other: ...\nclass Unfinished({base}): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_target", raising=False)
    registry = kind(owner=ONE)
    fields = {"params": ProcessorParams} if kind is LogitsProcessorRegistry else {}
    registry.add("other", "wrong_target:Other", **fields)
    registry.add("unfinished", "wrong_target:Unfinished", **fields)
    with pytest.raises(
        PluginError,
        match=rf"plugin 'one' .* 'other': 'wrong_target:Other' must be a subclass of {base}",
    ):
        registry.load("other")
    # A model's methods depend on what it does.
    if kind is ModelRegistry:
        return
    with pytest.raises(
        PluginError,
        match=rf"plugin 'one' .* 'unfinished': .* does not define .*, which {base} leaves to its "
        r"subclasses",
    ):
        registry.load("unfinished")


def test_a_target_that_is_no_function_is_refused():
    converters = ConverterRegistry(owner=ONE)
    converters.add("x", "toolkit_lm.plugin:API_VERSION")
    with pytest.raises(
        PluginError,
        match=r"plugin 'one' .*convert type 'x': 'toolkit_lm.plugin:API_VERSION' is not a "
        r"function, but a str",
    ):
        converters.load("x")


def test_making_a_target_names_its_plugin():
    converters = ConverterRegistry(owner=ONE)
    converters.add("x", "json:loads")
    failure = (
        r"plugin 'one' \(dist-one 1.0, .*json/decoder.py:\d+\) failed in convert type 'x': "
        r"JSONDecodeError"
    )
    with pytest.raises(PluginError, match=failure):
        converters.make("x", "{")
