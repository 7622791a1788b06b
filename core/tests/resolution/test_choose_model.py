"""Which class runs a checkpoint: the architecture's own, else the first fallback that does not
refuse; or the one asked for."""

from __future__ import annotations

import json
import sys
import types

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, PluginError, UnsupportedError
from toolkit_lm.model import FallbackModel
from toolkit_lm.plugin import Plugins, PluginWarning, hookimpl
from toolkit_lm.resolution.checkpoint import choose_model, find_tokenizer, read_checkpoint

KNOWN = {"architectures": ["KnownForCausalLM"]}
UNKNOWN = {"architectures": ["KnowmForCausalLM"]}


class Takes(FallbackModel):
    @classmethod
    def refuses(cls, vllm_config):
        assert vllm_config.checkpoint.architecture == vllm_config.hf_config["architectures"][0]


class Refuses(FallbackModel):
    @classmethod
    def refuses(cls, vllm_config):
        return "it is too new"


@pytest.fixture(autouse=True)
def targets(monkeypatch):
    module = types.ModuleType("fallback_targets")
    module.Takes = Takes
    module.Refuses = Refuses
    monkeypatch.setitem(sys.modules, module.__name__, module)


def plugins(**fallbacks) -> Plugins:
    class Registers:
        @hookimpl
        def toolkit_register_models(self, models):
            models.add("KnownForCausalLM", "known:KnownForCausalLM")
            for name, target in fallbacks.items():
                models.add_fallback(name, f"fallback_targets:{target}")

    return Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()])


def choose(hf_config, model_impl="auto", **fallbacks):
    return choose_model(VllmConfig.default(hf_config, model_impl=model_impl), plugins(**fallbacks))


def test_a_class_goes_before_fallbacks():
    assert choose(KNOWN, one="Takes") == ("KnownForCausalLM", [("KnownForCausalLM", None)])
    both = {"architectures": ["KnowmForCausalLM", "KnownForCausalLM"]}
    assert choose(both, one="Takes")[0] == "KnownForCausalLM"


def test_a_fallback_can_be_asked_for():
    assert choose(KNOWN, "one", one="Takes") == ("one", [("one", None), ("KnownForCausalLM", None)])
    with pytest.raises(
        UnsupportedError,
        match=r"'one' cannot run 'KnownForCausalLM' .*: it is too new. Supported: KnownForCausalLM",
    ):
        choose(KNOWN, "one", one="Refuses")
    with pytest.raises(UnsupportedError, match=r"it is too new\.$"):
        choose(UNKNOWN, "one", one="Refuses", two="Takes")


@pytest.mark.parametrize("name", ["onne", "KnownForCausalLM"])
def test_an_unknown_fallback_is_named(name):
    with pytest.raises(
        ConfigError, match=rf"no model implementation '{name}' is registered.*'?one"
    ):
        choose(KNOWN, name, one="Takes")


def test_the_first_fallback_that_does_not_refuse_is_taken():
    own = ("KnowmForCausalLM", "no installed plugin registers it")
    assert choose(UNKNOWN, one="Refuses", two="Takes", three="Takes") == (
        "two",
        [own, ("one", "it is too new"), ("two", None)],
    )


def test_a_broken_fallback_is_passed_over_unless_asked_for():
    with pytest.warns(PluginWarning, match="Absent"):
        key, candidates = choose(UNKNOWN, one="Absent", two="Takes")
    assert key == "two" and "failed in loading model architecture 'one'" in candidates[1][1]
    with pytest.raises(PluginError, match=r"failed in loading model architecture 'one'"):
        choose(UNKNOWN, "one", one="Absent", two="Takes")


def test_an_architecture_that_nothing_runs_is_one_error():
    message = (
        r"'KnowmForCausalLM' of .*\. The fallback 'one' cannot run it: it is too new\. Did you "
        r"mean 'KnownForCausalLM'\?.* Install"
    )
    with pytest.raises(CheckpointError, match=message):
        choose(UNKNOWN, one="Refuses")
    with pytest.raises(
        CheckpointError,
        match=r"too new\. `toolkit plugins show PLUGIN` lists a plugin's architectures\..* Install",
    ) as caught:
        choose({"architectures": ["T5EncoderModel"]}, one="Refuses")
    assert "KnownForCausalLM" not in str(caught.value)


def test_a_fallbacks_name_is_no_architecture():
    with pytest.raises(CheckpointError, match="'one'"):
        choose({"architectures": ["one"]}, one="Refuses")


def test_a_fallback_that_nobody_asked_for_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(UNKNOWN))
    with pytest.warns(
        PluginWarning,
        match=r"'KnowmForCausalLM' .*: the fallback 'one' runs it. model_impl='one' silences "
        r"this",
    ):
        found = read_checkpoint(VllmConfig.make(model=str(tmp_path)), plugins(one="Takes"))
    assert (found.architecture, found.hf_config) == ("one", UNKNOWN)
    # A warning would be an error here.
    assert (
        read_checkpoint(
            VllmConfig.make(model=str(tmp_path), model_impl="one"), plugins(one="Takes")
        )
        == found
    )


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_had_from_the_hub_only_where_it_is_trusted(tmp_path, monkeypatch, trusted):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN))
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda *_, allow_patterns, **__: asked.extend(allow_patterns) or tmp_path,
    )
    read_checkpoint(
        VllmConfig.make(model="someone/some-model", trust_remote_code=trusted), plugins()
    )
    assert ("*.py" in asked) == trusted


def test_a_tokenizer_has_a_hub_id_too(tmp_path, monkeypatch):
    """Its files are downloaded without weights. A value that is not a hub id is left to the
    renderer."""
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda *names, **how: asked.append((names, how)) or tmp_path,
    )
    found = find_tokenizer(
        VllmConfig.make(model="x", revision="main", tokenizer="someone/some-tokenizer")
    )
    [((name,), how)] = asked
    assert (found, name, how["revision"]) == (str(tmp_path), "someone/some-tokenizer", None)
    assert "*.json" in how["allow_patterns"] and "*.safetensors" not in how["allow_patterns"]
    for other in (None, str(tmp_path), "no folder", "/absent/a/b"):
        assert find_tokenizer(VllmConfig.make(tokenizer=other)) == other
    assert len(asked) == 1


def test_a_tokenizer_that_the_hub_does_not_give(monkeypatch):
    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(
        CheckpointError,
        match=r"tokenizer 'a/b' is not a local folder, and cannot be downloaded from the hub: "
        r"OSError: no net",
    ):
        find_tokenizer(VllmConfig.make(tokenizer="a/b"))
