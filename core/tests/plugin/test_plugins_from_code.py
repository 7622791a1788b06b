"""Plugins given from code: hooks, errors, options, events, fingerprint. Installed ones are tested
beside the distributions."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
import types

import msgspec
import pytest
from toolkit_lm._version import __version__
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, PluginError, UnsupportedError
from toolkit_lm.events import StepEvent
from toolkit_lm.plugin import API_VERSION, Plugins, PluginWarning, hookimpl, hookspec

NONE_INSTALLED = PluginsConfig(plugins=[])
STEP = StepEvent(time=0, duration=1, num_tokens=1)


class Base:
    """A plugin object: a name, and hooks in subclasses."""

    def __init__(self, name: str, **attributes) -> None:
        self.name = name
        vars(self).update(attributes)


class Model(Base):
    @hookimpl
    def toolkit_register_models(self, models):
        models.add(
            "XForCausalLM", f"{self.name}.model:X", override=getattr(self, "override", False)
        )


class Configure(Base):
    @hookimpl
    def toolkit_configure(self, config):
        return self.change(config)


class Watch(Base):
    @hookimpl
    def toolkit_event(self, event):
        self.seen.append(event)
        if self.fails:
            raise RuntimeError("cannot count")


class Maker(Base):
    """Makes listeners that note what happens, or fail."""

    @hookimpl
    def toolkit_watch(self, config, options):
        assert options is None
        self.fails("watch")
        return self.listener

    @property
    def listener(self):
        return types.SimpleNamespace(
            on_event=lambda event: self.fails("event"), close=lambda: self.fails("close")
        )

    def fails(self, when):
        self.seen.append(when)
        if when == self.when:
            raise RuntimeError(f"cannot {when}")


def load(*objects, **config):
    return Plugins.load(PluginsConfig(plugins=[], **config), extra=objects)


def module_from(text: str, name: str = "from_text") -> types.ModuleType:
    module = types.ModuleType(name)
    exec(text, module.__dict__)
    return module


def test_the_api_version_is_that_of_core():
    assert __version__.startswith(API_VERSION + ".")


def test_importing_core_imports_nothing_heavy_and_discovers_nothing():
    code = (
        "import sys, toolkit_lm.plugin; print([m for m in sys.modules if m == 'torch' or "
        "m.startswith('toolkit_lm_')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_core_is_always_there():
    plugins = Plugins.load(NONE_INSTALLED)
    assert [info.name for info in plugins.infos if info.status == "ok"] == ["core"]
    assert set(plugins.kv_kinds.keys()) == {"full", "window", "cross"}


def test_modules_and_objects_are_plugins():
    module = module_from(
        "from toolkit_lm.plugin import hookimpl\n@hookimpl\ndef toolkit_register_models(models): "
        "models.add('YForCausalLM', 'y:Y')",
        "in_module",
    )
    plugins = load(Model("a"), module)
    assert [(entry.key, entry.plugin) for entry in plugins.models.entries()] == [
        ("XForCausalLM", "a"),
        ("YForCausalLM", "in_module"),
    ]
    assert plugins.info("a").hooks == ["toolkit_register_models"]
    assert plugins.info("a").distribution is None
    with pytest.raises(PluginError, match=r"there is no plugin 'b'"):
        plugins.info("b")


def test_two_sets_in_one_process_do_not_meet():
    a = Model("a")
    assert len(load(a).models) == 1
    assert len(load().models) == 0
    assert len(load(a).models) == 1


def test_a_plugin_from_code_that_fails_is_fatal():
    class Raising(Base):
        @hookimpl
        def toolkit_register_models(self, models):
            raise ZeroDivisionError("no model")

    with pytest.raises(PluginError, match=r"plugin 'bad' .*ZeroDivisionError: no model") as caught:
        load(Raising("bad"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_duplicate_key_names_both():
    with pytest.raises(
        PluginError, match=r"'XForCausalLM' is registered by plugin 'a' .* and by plugin 'b'"
    ):
        load(Model("a"), Model("b"))
    assert load(Model("a"), Model("b", override=True)).models.get("XForCausalLM").plugin == "b"


def test_a_duplicate_name_is_an_error():
    with pytest.raises(PluginError, match=r"plugin 'a'"):
        load(Model("a"), Model("a", override=True))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "@hookimpl\ndef toolkit_register_model(models): ...",
            "no hook 'toolkit_register_model'. Did you mean 'toolkit_register_models'",
        ),
        (
            "@hookimpl\ndef register_models(models): ...",
            "no hook 'register_models'. Did you mean 'toolkit_register_models'",
        ),
        (
            "def toolkit_register_models(models): ...",
            "'toolkit_register_models' is not marked with @hookimpl",
        ),
        ("def toolkit_registr(models): ...", "'toolkit_registr' is not marked with @hookimpl"),
        (
            "@hookimpl\ndef toolkit_register_models(registry): ...",
            "hook '.*' has no argument 'registry'. Known: models",
        ),
        ("@hookimpl(wrapper=True)\ndef toolkit_event(event): yield", "says wrapper=True"),
        ("@hookimpl(tryfirst=True)\ndef toolkit_event(event): ...", "says tryfirst=True"),
        (
            "@hookimpl(specname='toolkit_evnt')\ndef watch(event): ...",
            "no hook 'toolkit_evnt'. Did you mean 'toolkit_event'",
        ),
    ],
)
def test_a_wrong_hook_is_an_error(text, error):
    with pytest.raises(PluginError, match=f"plugin 'from_text' .*{error}"):
        load(module_from("from toolkit_lm.plugin import hookimpl\n" + text))


def test_a_hook_of_a_plugin_that_is_not_there_may_be_optional():
    text = (
        "from toolkit_lm.plugin import hookimpl\n@hookimpl(optionalhook=True)\ndef "
        "toolkit_brought_by_another(): ..."
    )
    assert load(module_from(text)).info("from_text").hooks == []


def test_a_class_is_no_plugin():
    with pytest.raises(PluginError, match=r"Model is a class"):
        load(Model)


def test_an_implementation_may_take_fewer_arguments():
    class Silent(Base):
        @hookimpl
        def toolkit_event(self):
            self.seen.append("event")

    seen = []
    load(Silent("a", seen=seen)).event(STEP)
    assert seen == ["event"]


def test_configure_goes_from_plugin_to_plugin():
    first = Configure("first", change=lambda config: config.replace(block_size=32))
    second = Configure(
        "second", change=lambda config: config.replace(max_num_seqs=config.cache.block_size)
    )
    third = Configure("third", change=lambda config: None)
    config = load(first, second, third).configure(VllmConfig.make())
    assert (config.cache.block_size, config.scheduler.max_num_seqs) == (32, 32)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda config: 3, "must return a VllmConfig or None, not a int"),
        (
            lambda config: config.replace(block_size=0),
            "failed in toolkit_configure: .*block_size",
        ),
        (lambda config: config.replace(disable_plugins=["x"]), "loaded already"),
    ],
)
def test_configure_that_fails_names_the_plugin(change, error):
    with pytest.raises(PluginError, match=f"plugin 'wrong' .*{error}"):
        load(Configure("wrong", change=change)).configure(VllmConfig.make())


def test_events_reach_every_watcher_and_a_failing_one_is_dropped():
    good = Watch("good", seen=[], fails=False)
    bad = Watch("bad", seen=[], fails=True)
    plugins = load(bad, good)
    assert plugins.has_event_listeners
    with pytest.warns(
        PluginWarning, match=r"plugin 'bad' .*gets no more events: RuntimeError: cannot count"
    ):
        plugins.event(STEP)
    plugins.event(STEP)
    assert (len(good.seen), len(bad.seen)) == (2, 1)


def test_what_watches_one_engine_ends_with_it():
    maker = Maker("maker", seen=[], when=None)
    watch = Watch("watch", seen=[], fails=False)
    plugins = load(maker, watch)
    plugins.event(STEP)
    plugins.watch(VllmConfig.make())
    plugins.event(STEP)
    plugins.close()
    plugins.event(STEP)
    plugins.close()
    assert (maker.seen, len(watch.seen)) == (["watch", "event", "close"], 3)


def test_a_plugin_may_have_nothing_to_watch():
    plugins = load(
        module_from(
            "from toolkit_lm.plugin import hookimpl\n@hookimpl\ndef toolkit_watch(config): "
            "return None"
        )
    )
    plugins.watch(VllmConfig.make())
    assert not plugins.has_event_listeners


def test_a_listener_that_fails_is_dropped_and_closed():
    bad = Maker("bad", seen=[], when="event")
    good = Maker("good", seen=[], when=None)
    plugins = load(bad, good)
    plugins.watch(VllmConfig.make())
    with pytest.warns(
        PluginWarning, match=r"plugin 'bad' .*gets no more events: RuntimeError: cannot event"
    ):
        plugins.event(STEP)
    plugins.event(STEP)
    plugins.close()
    assert (bad.seen, good.seen) == (
        ["watch", "event", "close"],
        ["watch", "event", "event", "close"],
    )


def test_a_listener_that_cannot_be_closed_is_warned_about():
    bad = Maker("bad", seen=[], when="close")
    good = Maker("good", seen=[], when=None)
    plugins = load(bad, good)
    plugins.watch(VllmConfig.make())
    with pytest.warns(
        PluginWarning,
        match=r"plugin 'bad' .*failed to close its event listener: RuntimeError: cannot close",
    ):
        plugins.close()
    assert good.seen == ["watch", "close"]


def test_a_watch_that_fails_is_fatal_and_leaves_no_listener():
    good = Maker("good", seen=[], when=None)
    bad = Maker("bad", seen=[], when="watch")
    plugins = load(good, bad)
    with pytest.raises(
        PluginError, match=r"plugin 'bad' .*failed in toolkit_watch: RuntimeError: cannot watch"
    ):
        plugins.watch(VllmConfig.make())
    assert good.seen == ["watch", "close"]
    assert not plugins.has_event_listeners


def test_without_watchers_there_is_nothing_to_do():
    assert not load(Model("a")).has_event_listeners


def test_a_plugin_brings_hooks_of_its_own():
    specs = types.ModuleType("specs")

    @hookspec
    def toolkit_say(word: str) -> str:
        raise NotImplementedError

    specs.toolkit_say = toolkit_say

    class Brings(Base):
        @hookimpl
        def toolkit_register_hookspecs(self):
            return self.specs

    class Says(Base):
        @hookimpl
        def toolkit_say(self, word):
            return word + self.name

    plugins = load(Says("a"), Brings("brings", specs=specs), Says("b"))
    assert plugins.hook.toolkit_say(word="hi ") == ["hi b", "hi a"]
    assert [
        (info.name, call(word="")) for info, call in plugins.implementations("toolkit_say")
    ] == [("a", "a"), ("b", "b")]
    with pytest.raises(PluginError, match=r"no hook 'toolkit_say'"):
        load(Says("a"))
    with pytest.raises(PluginError, match=r"'toolkit_say' has a specification already"):
        load(Brings("one", specs=specs), Brings("two", specs=specs))


def test_a_hook_must_have_the_prefix():
    specs = types.ModuleType("specs")
    specs.say = hookspec(lambda word: None)

    class Brings(Base):
        @hookimpl
        def toolkit_register_hookspecs(self):
            return [specs]

    with pytest.raises(
        PluginError, match=r"hook 'say' must have a name that starts with 'toolkit_'"
    ):
        load(Brings("brings"))


class StructOptions(msgspec.Struct):
    size: int
    name: str = "x"


@dataclasses.dataclass
class DataOptions:
    size: int
    name: str = "x"


def pydantic_options():
    import pydantic

    return pydantic.create_model("PydanticOptions", size=(int, ...), name=(str, "x"))


@pytest.fixture(params=["struct", "dataclass", "pydantic"])
def options_class(request):
    return {
        "struct": lambda: StructOptions,
        "dataclass": lambda: DataOptions,
        "pydantic": pydantic_options,
    }[request.param]()


def test_options_are_made_by_the_plugins_own_model(options_class):
    plugins = load(Base("a", Options=options_class), plugin_option={"a": {"size": "3"}})
    options = plugins.options("a")
    assert isinstance(options, options_class)
    assert (options.size, options.name) == (3, "x")
    assert plugins.options("a") is options
    assert plugins.options_class("a") is options_class


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"size": 1, "nane": "y"}, "no option 'nane'. Did you mean 'name'"),
        ({"size": "many"}, r"option size\b(?! must.*not \{).*'many'"),
        ({"name": "y"}, "size"),
    ],
)
def test_wrong_options_name_the_plugin(options_class, given, error):
    with pytest.raises(ConfigError, match=f"(?s)plugin 'a' .*{error}"):
        load(Base("a", Options=options_class), plugin_option={"a": given})


def test_options_that_are_needed_and_not_given(options_class):
    plugins = load(Base("a", Options=options_class))
    with pytest.raises(ConfigError, match=r"(?s)plugin 'a' .*size"):
        plugins.options("a")


@pytest.mark.parametrize("kind", [type("Options", (), {"size": 3}), {"size": 3}])
def test_options_of_an_unsupported_kind_are_an_error_at_load(kind):
    with pytest.raises(
        PluginError,
        match=r"plugin 'a' .*Options must be a msgspec Struct, a dataclass or a pydantic model",
    ):
        load(Base("a", Options=kind))


def test_configure_gets_the_plugin_s_options(options_class):
    class Sized(Base):
        @hookimpl
        def toolkit_configure(self, config, options):
            return config.replace(block_size=options.size)

    plugins = load(Sized("a", Options=options_class), plugin_option={"a": {"size": "64"}})
    assert plugins.configure(VllmConfig.make()).cache.block_size == 64


def test_a_slow_listener_is_warned_about_once(monkeypatch):
    """Total time counts: one late event is not enough."""
    now = [0.0]
    monkeypatch.setattr("toolkit_lm.plugin.plugins.time.perf_counter", lambda: now[0])

    class Slow(Base):
        @hookimpl
        def toolkit_event(self, event):
            now[0] += self.seconds

    plugin = Slow("slow", seconds=0.9)
    plugins = load(plugin)
    plugins.event(STEP)
    plugin.seconds = 0.004
    for _ in range(100):
        plugins.event(STEP)
    plugin.seconds = 0.25
    with pytest.warns(
        PluginWarning, match=r"plugin 'slow' .* is slow: outputs waited 0\.25 s"
    ) as caught:
        for _ in range(100):
            plugins.event(STEP)
    assert len(caught) == 1


def test_options_for_nobody():
    with pytest.raises(ConfigError, match=r"plugin 'b', which is not loaded. Known: a, core"):
        load(Base("a"), plugin_option={"b": {"x": 1}})
    with pytest.raises(ConfigError, match=r"plugin 'a' .*takes no options, but is given 'x'"):
        load(Base("a"), plugin_option={"a": {"x": 1}})
    assert load(Base("a")).options("a") is None


def test_an_unknown_plugin_in_a_list_is_an_error():
    for option in ("plugins", "disable_plugins"):
        with pytest.raises(
            PluginError,
            match=f"'{option}' names plugin 'serber', which is not installed. Did you mean "
            "'server'",
        ):
            Plugins.load(PluginsConfig(**{option: ["serber"]}))


def test_the_architecture_error_names_plugins_that_are_off():
    with pytest.raises(
        UnsupportedError, match=r"no model architecture 'LlamaForCausalLM'.*might add it: .*decoder"
    ):
        Plugins.load(NONE_INSTALLED).models.get("LlamaForCausalLM")


def test_builtin_distributions_come_first_and_code_last():
    plugins = Plugins.load(PluginsConfig(plugins=["decoder", "sdpa"]), extra=[Base("a")])
    assert [info.name for info in plugins.infos if info.status == "ok"] == [
        "core",
        "decoder",
        "sdpa",
        "a",
    ]
    assert plugins.info("server").status == "disabled"


def test_a_fingerprint_tells_what_differs():
    one = load(Base("a"), Base("b")).fingerprint()
    two = load(Base("a"), Base("b")).fingerprint()
    assert (one, one.digest, one.difference(two)) == (two, two.digest, "")
    other = load(Base("b"), Model("c")).fingerprint()
    assert one.digest != other.digest
    assert one.difference(other).splitlines() == ["plugin 'a': only here", "plugin 'c': only there"]
    assert "load order: core, a, b here, core, b, a there" in one.difference(
        load(Base("b"), Base("a")).fingerprint()
    )
    assert msgspec.json.decode(msgspec.json.encode(one), type=type(one)) == one
    assert (
        load(types.ModuleType("not_in_sys_modules")).fingerprint().plugins[-1].name
        == "not_in_sys_modules"
    )


def test_a_fingerprint_sees_content(tmp_path, monkeypatch):
    package = tmp_path / "printed_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import printed_plugin

    before = load(printed_plugin).fingerprint()
    (package / "inner.py").write_text("A = 2\n")
    # The loaded code is as it was.
    assert load(printed_plugin).fingerprint() == before
    del sys.modules["printed_plugin"]
    after = load(importlib.import_module("printed_plugin")).fingerprint()
    assert "plugin 'printed_plugin': from code" in before.difference(after)
    del sys.modules["printed_plugin"]


def test_a_plugin_may_be_made_in_a_script_that_has_no_file():
    code = """
from toolkit_lm.plugin import Plugins

class Counter:
    name = "counter"

print(Plugins.load(extra=[Counter()]).fingerprint().digest)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=code,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout.strip()) == 64
