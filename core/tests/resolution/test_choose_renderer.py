"""Which renderer reads a checkpoint: the one of the highest priority that does not refuse it, or
the one asked for."""

from __future__ import annotations

import sys
import types

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, PluginError, UnsupportedError
from toolkit_lm.plugin import Plugins, PluginWarning, hookimpl
from toolkit_lm.renderer import Renderer
from toolkit_lm.resolution.resolution import choose_renderer

MODULE = "renderers_of_a_test"


def renderer(refuses):
    members = dict.fromkeys(Renderer.__abstractmethods__) | {
        "refuses": classmethod(lambda cls, config: refuses(config))
    }
    return type("Made", (Renderer,), members)


@pytest.fixture
def choose(monkeypatch, tmp_path):
    """Chooses for a folder with a tokenizer.json, among renderers: name -> (priority, refusal or
    function, what it reads)."""
    (tmp_path / "tokenizer.json").touch()

    def choose(wanted="auto", model_wants=None, renderer_url=(), asks_servers=(), **given):
        module = types.ModuleType(MODULE)
        monkeypatch.setitem(sys.modules, MODULE, module)

        class Registers:
            @hookimpl
            def toolkit_register_renderers(self, renderers):
                for name, (priority, refusal, *reads) in given.items():
                    refuses = (
                        refusal if callable(refusal) else lambda config, refusal=refusal: refusal
                    )
                    setattr(module, name, renderer(refuses))
                    renderers.add(
                        name,
                        f"{MODULE}:{name}",
                        priority=priority,
                        reads=tuple(reads) or ("tokenizer.json",),
                        asks_servers=name in asks_servers,
                    )

            @hookimpl
            def toolkit_register_models(self, models):
                models.add("AnyForCausalLM", "nowhere:Any", renderer=model_wants)

        config = VllmConfig.default(
            {"architectures": ["AnyForCausalLM"]},
            renderer=wanted,
            renderer_url=list(renderer_url),
            tokenizer=str(tmp_path),
        )
        return choose_renderer(config, Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()]))

    return choose


def test_the_highest_priority_that_does_not_refuse(choose):
    assert choose(
        low=(0, None), high=(5, None), higher=(9, "its vocabulary has another version")
    ) == (
        "high",
        [("higher", "its vocabulary has another version"), ("high", None), ("low", None)],
    )


def test_where_servers_are_named_the_renderer_that_asks_servers(choose):
    servers = {"renderer_url": ["http://127.0.0.1:1"]}
    some = {"here": (5, None), "there": (0, None)}
    assert choose(**servers, asks_servers=["there"], **some)[0] == "there"
    assert choose(asks_servers=["there"], **some)[0] == "here"
    with pytest.raises(UnsupportedError, match="no installed renderer asks any"):
        choose(**servers, **some)


def test_of_equals_the_first(choose):
    assert choose(b=(0, None), a=(0, None))[0] == "b"


def test_a_folder_without_its_files_is_a_refusal_before_the_class_is_asked(choose):
    def never(config):
        raise AssertionError("its files are not there")

    name, candidates = choose(other=(5, never, "vocab.bin", "vocab.txt"), plain=(0, None))
    assert name == "plain" and candidates[0][1].endswith("has none of vocab.bin, vocab.txt")


def test_it_is_asked_about_the_checkpoint(choose):
    asked = []
    choose(one=(0, asked.append))
    assert asked[0].checkpoint.architecture == "AnyForCausalLM"


@pytest.mark.parametrize("way", ["wanted", "model_wants"])
def test_one_that_is_asked_for_may_refuse_too(choose, way):
    assert choose(**{way: "low"}, low=(0, None), high=(5, None)) == ("low", [("low", None)])
    error = r"renderer 'low' cannot read the tokenizer of .*: it is too old\. Supported: high\."
    with pytest.raises(UnsupportedError, match=error):
        choose(**{way: "low"}, low=(0, "it is too old"), high=(5, None))


def test_an_unknown_name(choose):
    with pytest.raises(ConfigError, match=r"no renderer 'lov' is registered. Did you mean 'low'"):
        choose("lov", low=(0, None))


def test_all_refuse(choose):
    with pytest.raises(
        UnsupportedError, match=r"no renderer can read the tokenizer of .*: high: no; low: never\."
    ):
        choose(low=(0, "never"), high=(5, "no"))


def test_one_that_cannot_be_asked_is_passed_over(choose):
    def boom(config):
        raise RuntimeError("boom")

    with pytest.warns(
        PluginWarning, match=r"failed in refuses\(\) of renderer 'high': RuntimeError: boom"
    ):
        assert choose(low=(0, None), high=(5, boom))[0] == "low"
    with pytest.raises(
        PluginError, match=r"failed in refuses\(\) of renderer 'high': RuntimeError: boom"
    ):
        choose("high", low=(0, None), high=(5, boom))
