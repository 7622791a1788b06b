"""Registrations of the plugin: files choose a loader, and dummy weights fit any model."""

import pytest
import torch
from safetensors.torch import save_file
from toolkit_lm.config import PluginsConfig
from toolkit_lm.plugin import Plugins
from torch import nn


@pytest.fixture(scope="module")
def loaders():
    return Plugins.load(PluginsConfig(plugins=["loaders"])).loaders


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"],
)
def test_these_files_are_read_as_safetensors(loaders, tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    assert loaders.reading(tmp_path) == "safetensors"


def test_other_files_choose_none(loaders, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert loaders.reading(tmp_path) is None


def test_safetensors_gives_what_was_saved(loaders, tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    [(name, tensor)] = loaders.make("safetensors", tmp_path)
    assert name == "weight" and torch.equal(tensor, weight)


def test_dummy_weights_depend_on_name_and_shape_alone(loaders, tmp_path):
    first = nn.Linear(3, 2)
    second = nn.Sequential()
    second.add_module("weight_of_another", nn.Linear(5, 5))
    second.register_parameter("weight", nn.Parameter(torch.zeros(2, 3)))
    for model in (first, second):
        loaders.make("dummy", tmp_path).load(model)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(second.weight_of_another.weight[:2, :3], second.weight)
