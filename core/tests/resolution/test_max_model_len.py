"""How long a sequence may be: what the checkpoint states under its model's key, or what the user
says."""

from __future__ import annotations

import json

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.resolution.resolution import resolve_configured


class Registers:
    name = "registers"

    @hookimpl
    def toolkit_register_models(self, models):
        models.add("UsualForCausalLM", "nowhere:Usual")
        models.add("ReservedForCausalLM", "nowhere:Reserved", reserved_positions=2)
        models.add("GlmForCausalLM", "nowhere:Glm", length_keys=("seq_length",))
        models.add("AlibiForCausalLM", "nowhere:Alibi", length_keys=())

    @hookimpl
    def toolkit_register_renderers(self, renderers):
        renderers.add("none", "toolkit_lm_renderer_hf.renderer:HfRenderer", reads=("config.json",))


@pytest.fixture
def length_of(tmp_path):
    """A function (architecture, max_model_len, **config.json): the length that the engine takes."""

    def resolved(name, wanted=None, **hf_config):
        (tmp_path / "config.json").write_text(
            json.dumps({"architectures": [f"{name}ForCausalLM"], **hf_config})
        )
        config = VllmConfig.make(model=str(tmp_path), max_model_len=wanted)
        return resolve_configured(
            config, Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()])
        ).max_model_len

    return resolved


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
def test_it_is_what_config_json_usually_states(length_of, key):
    assert length_of("Usual", **{key: 64, "seq_length": 7}) == 64
    assert length_of("Usual", 10, **{key: 64}) == 10
    assert length_of("Reserved", **{key: 64}) == 62
    with pytest.raises(
        ConfigError, match="max_model_len is 65, but the checkpoint has 64 positions"
    ):
        length_of("Usual", 65, **{key: 64})


def test_a_model_says_under_which_key_it_stands(length_of):
    assert length_of("Glm", seq_length=48, max_position_embeddings=7) == 48
    with pytest.raises(
        ConfigError, match="max_model_len is 49, but the checkpoint has 48 positions"
    ):
        length_of("Glm", 49, seq_length=48)
    with pytest.raises(ConfigError, match=r"config\.json states no seq_length: give max_model_len"):
        length_of("Glm", max_position_embeddings=64)


def test_a_model_without_positions_has_the_length_that_is_asked_for(length_of):
    assert length_of("Alibi", 100_000, max_position_embeddings=64, seq_length=64) == 100_000
    with pytest.raises(
        ConfigError, match=r"AlibiForCausalLM has no longest sequence: give max_model_len"
    ):
        length_of("Alibi", max_position_embeddings=64, seq_length=64)
    with pytest.raises(
        ConfigError, match=r"config\.json states no max_position_embeddings or n_positions"
    ):
        length_of("Usual")
