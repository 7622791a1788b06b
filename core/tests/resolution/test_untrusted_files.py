"""JSON files of a checkpoint that nobody vouches for: a CheckpointError, at once and with little
memory."""

from __future__ import annotations

import json
import os

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.resolution.checkpoint import read_checkpoint, read_json
from toolkit_lm.resolution.resolution import resolve_configured


class Registers:
    name = "registers"

    @hookimpl
    def toolkit_register_models(self, models):
        models.add("KnownForCausalLM", "nowhere:Known")

    @hookimpl
    def toolkit_register_renderers(self, renderers):
        renderers.add("none", "toolkit_lm_renderer_hf.renderer:HfRenderer", reads=("config.json",))


def plugins() -> Plugins:
    return Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()])


@pytest.fixture
def resolve(tmp_path):
    """A function (**config.json, max_model_len=None): the resolved config."""

    def resolved(max_model_len=None, **hf_config):
        values = {"architectures": ["KnownForCausalLM"], "max_position_embeddings": 64, **hf_config}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return resolve_configured(
            VllmConfig.make(model=str(tmp_path), max_model_len=max_model_len), plugins()
        )

    return resolved


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' * 100_000, "cannot be read: maximum recursion depth"),
        ("[" * 100_000, "cannot be read: maximum recursion depth"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "cannot be read: Exceeds the limit"),
        ('{"a": "' + "x" * 2**24 + '"}', "is too large: it may have 16777216 bytes"),
        ("\xff", "cannot be read: 'utf-8' codec"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_file_that_cannot_be_taken_in(tmp_path, name, text, message):
    (tmp_path / "config.json").write_text('{"architectures": ["KnownForCausalLM"]}')
    (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"/{name}' {message}"):
        read_checkpoint(VllmConfig.make(model=str(tmp_path)), plugins())


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_json(tmp_path / "config.json")
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text('{"architectures": ["KnownForCausalLM"]}')
    assert read_checkpoint(VllmConfig.make(model=str(tmp_path)), plugins()).generation_config == {}


def test_links_are_followed_as_the_cache_of_the_hub_needs(tmp_path):
    blob = tmp_path / "blobs" / "0f1e"
    folder = tmp_path / "snapshots" / "main"
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    blob.write_text('{"architectures": ["KnownForCausalLM"]}')
    (folder / "config.json").symlink_to("../../blobs/0f1e")
    assert (
        read_checkpoint(VllmConfig.make(model=str(folder)), plugins()).architecture
        == "KnownForCausalLM"
    )
    blob.unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        read_checkpoint(VllmConfig.make(model=str(folder)), plugins())


@pytest.mark.parametrize("nested", [None, "text_config", "encoder", "decoder"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("n_layer", 10**9),
        ("hidden_size", 10**12),
        ("vocab_size", 10**12),
        ("vocab_size", -1),
        ("num_key_value_heads", 0),
        ("n_head", 0),
        ("head_dim", 10**9),
        ("encoder_layers", 10**9),
        ("num_heads", 0),
        ("n_positions", 10**18),
        ("n_embd", 1.5),
        ("intermediate_size", True),
        ("hidden_size", {"a": "x" * 10**6}),
    ],
)
def test_sizes_have_bounds(resolve, key, value, nested):
    with pytest.raises(
        CheckpointError,
        match=rf"config\.json': {key} must be an integer of at least 1, at most \d+, not "
        rf".{{0,99}}$",
    ):
        resolve(**({nested: {key: value}} if nested else {key: value}))


def test_what_must_be_an_object(resolve):
    with pytest.raises(CheckpointError, match="'text_config' must be of type dict"):
        resolve(text_config=[1])
    with pytest.raises(CheckpointError, match="'rope_scaling' must be of type dict"):
        resolve(rope_scaling="linear")


@pytest.mark.parametrize("names", [None, [], "A", [3], ["A" * 10**6]])
def test_architectures_are_names(resolve, names):
    with pytest.raises(CheckpointError, match=r"names no model class: 'architectures' is .{0,99}$"):
        resolve(architectures=names)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1, 0, 1e9, 10**400, "x", True])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn"])
def test_a_factor_has_bounds(resolve, kind, factor):
    with pytest.raises(CheckpointError, match=r"factor"):
        resolve(rope_scaling={"rope_type": kind, "factor": factor})


def test_the_length_before_yarn_is_a_number(resolve):
    with pytest.raises(
        CheckpointError, match="'original_max_position_embeddings' must be of type int"
    ):
        resolve(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": "x",
            }
        )


def test_a_very_long_context_must_be_asked_for(resolve):
    """Tables of angles, and of positions, have a row for each."""
    with pytest.raises(
        ConfigError,
        match="the checkpoint states 100000000 positions, which take much memory: give "
        "max_model_len",
    ):
        resolve(max_position_embeddings=10**8)
    with pytest.raises(ConfigError, match="max_model_len"):
        resolve(max_position_embeddings=2**20, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert resolve(max_position_embeddings=10**8, max_model_len=32).max_model_len == 32
    assert resolve(max_position_embeddings=2**20).max_model_len == 2**20


@pytest.mark.parametrize("method", [["gptq"], {"a": 1}, 3])
def test_a_quantization_is_a_name(resolve, method):
    from toolkit_lm.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="no loaded plugin has a quantization"):
        resolve(quantization_config={"quant_method": method})
