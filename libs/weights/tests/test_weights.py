"""Checkpoint folders: what is read, and what is said of a broken one. Names of weights are matched
by a small model."""

import json
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import CapacityError, CheckpointError
from toolkit_lm.model import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    Model,
    load_model,
)
from toolkit_lm.plugin import Plugins
from toolkit_lm_weights.safetensors import CheckpointWeights
from torch import nn


class TwoLayers(Model):
    packed = {"pair": ("left", "right")}
    renames = ((r"^transformer\.", ""), (r"\.gamma$", ".weight"))
    ignored = (r"\.cached$",)

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pair = MergedColumnParallelLinear(4, [2, 3], vllm_config=vllm_config, prefix="pair")
        self.out = ColumnParallelLinear(4, 6, vllm_config=vllm_config, prefix="out")
        self.norm = nn.LayerNorm(4, bias=False)
        self.register_buffer("scale", torch.zeros(2))


WEIGHTS = {
    "left.weight": torch.randn(2, 4),
    "right.weight": torch.randn(3, 4),
    "out.weight": torch.randn(6, 4),
    "norm.weight": torch.randn(4),
    "scale": torch.randn(2),
}


def config_for(folder, **options):
    config = VllmConfig.default({"architectures": ["TwoLayers"]}, **options)
    return msgspec.structs.replace(
        config, checkpoint=msgspec.structs.replace(config.checkpoint, path=str(folder))
    )


def load(folder, **options):
    return load_model(
        TwoLayers,
        config_for(folder, **options),
        torch.device("cpu"),
        Plugins.load(PluginsConfig(plugins=["loaders"])),
    )


def write_sharded(folder):
    names = list(WEIGHTS)
    files = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: WEIGHTS[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )


def assert_loaded(model):
    # Projections may have packed their weights: multiplying by the identity brings them back.
    assert torch.equal(
        model.pair(torch.eye(4)).T, torch.cat((WEIGHTS["left.weight"], WEIGHTS["right.weight"]))
    )
    assert torch.equal(model.out(torch.eye(4)).T, WEIGHTS["out.weight"])
    assert torch.equal(model.norm.weight, WEIGHTS["norm.weight"])
    assert torch.equal(model.scale, WEIGHTS["scale"])


def test_a_single_file(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert_loaded(model)
    assert not model.training
    assert not any(param.requires_grad for param in model.parameters())


def test_several_files_with_an_index(tmp_path):
    write_sharded(tmp_path)
    assert_loaded(load(tmp_path))


def test_names_are_translated_and_some_passed_over(tmp_path):
    renamed = {
        f"transformer.{name}".replace("norm.weight", "norm.gamma"): tensor
        for name, tensor in WEIGHTS.items()
    }
    save_file({**renamed, "transformer.out.cached": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert_loaded(load(tmp_path))


def test_the_names_filled_are_returned():
    model = TwoLayers(vllm_config=VllmConfig.default())
    assert model.load_weights(WEIGHTS.items()) == {
        "pair.weight",
        "out.weight",
        "norm.weight",
        "scale",
    }


def test_weights_take_the_dtype_of_the_model(tmp_path):
    save_file(
        {name: tensor.bfloat16() for name, tensor in WEIGHTS.items()},
        tmp_path / "model.safetensors",
    )
    model = load(tmp_path)
    assert model.norm.weight.dtype == model.out(torch.eye(4)).dtype == torch.float32


def test_half_of_a_packed_weight_is_not_enough():
    model = TwoLayers(vllm_config=VllmConfig.default())
    with pytest.raises(CheckpointError, match=r"^1 missing: right\.weight\.$"):
        model.load_weights(
            (name, tensor) for name, tensor in WEIGHTS.items() if name != "right.weight"
        )


def test_a_missing_file_of_an_index_is_named(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"index\.json names files that are missing: model-00002-of-00002\.safetensors",
    ):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_a_broken_index_is_named(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors\.index\.json is not an index of weights"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "/etc/model.safetensors", "sub/model.safetensors", 3]
)
def test_an_index_cannot_name_files_of_other_folders(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="which is not a file of the same folder"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = tmp_path / "model.safetensors"
    save_file(WEIGHTS, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError,
        match=r"model\.safetensors is not a readable safetensors file; it may be truncated",
    ):
        load(tmp_path)


def lying_header(folder, **header):
    """A file of 16 bytes of data whose header says something else of them."""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))


def stated(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": stated([10**6], 0, 4 * 10**6)},
        {"a": stated([10**12], 0, 16)},
        {"a": stated([2**62, 4], 0, 16)},
        {"a": stated([4], 0, 16), "b": stated([4], 0, 16)},
        {"a": stated([2], 8, 16)},
        {"a": stated([4], 16, 0)},
        {"a": stated([-4], 0, 16)},
        {"a": stated([4], 0, 16, "F99")},
        {"a": 3},
    ],
)
def test_a_header_that_lies_is_named(tmp_path, header):
    lying_header(tmp_path, **header)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is not a readable safetensors file"
    ):
        load(tmp_path)


@pytest.mark.parametrize("length", [2**63, 2**40, 0])
def test_a_header_of_an_absurd_length_is_named(tmp_path, length):
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(16))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is not a readable safetensors file"
    ):
        load(tmp_path)


def test_weights_that_are_no_regular_file_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds neither"):
        load(tmp_path)


def test_links_to_weights_are_followed(tmp_path):
    """Links into ../../blobs are followed, like in the hub's cache."""
    folder = tmp_path / "snapshots" / "main"
    folder.mkdir(parents=True)
    save_file(WEIGHTS, tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../../blob")
    assert_loaded(load(folder))


class Huge(Model):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.out = ColumnParallelLinear(2**24, 2**24, vllm_config=vllm_config, prefix="out")


def test_a_model_that_does_not_fit_into_memory_is_named(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(
        CapacityError,
        match=r"making Huge from the config\.json of .* takes more memory than there is",
    ):
        load_model(
            Huge,
            config_for(tmp_path),
            torch.device("cpu"),
            Plugins.load(PluginsConfig(plugins=["loaders"])),
        )


def test_garbage_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 200)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is not a readable safetensors file"
    ):
        load(tmp_path)


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"pickles only \(pytorch_model\.bin\).*Convert to safetensors"
    ):
        load(tmp_path)


def test_a_folder_without_weights_or_none_at_all(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"holds neither model\.safetensors nor .* It holds: config\.json"
    ):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint folder .*absent"):
        load(tmp_path / "absent")


def test_weights_are_mapped_and_not_copied(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    first = dict(CheckpointWeights(tmp_path))
    assert {name: tensor.tolist() for name, tensor in first.items()} == {
        name: tensor.tolist() for name, tensor in WEIGHTS.items()
    }
    ranges = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tmp_path) in line
    ]
    for tensor in first.values():
        assert any(int(start, 16) <= tensor.data_ptr() < int(end, 16) for start, end in ranges)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_read_is_not_kept_in_memory(tmp_path, monkeypatch):
    """A file of 64 MB takes far less of this process's memory at a time."""
    weights = {f"w{i:02}": torch.full((2**20,), float(i)) for i in range(16)}
    save_file(weights, tmp_path / "model.safetensors")
    monkeypatch.setattr("toolkit_lm_weights.safetensors._MOST_MAPPED", 2**23)
    status = Path("/proc/self/status")

    def mapped() -> int:
        return int(re.search(r"RssFile:\s+(\d+)", status.read_text())[1]) * 1024

    before = mapped()
    most = 0
    found = {}
    for name, tensor in CheckpointWeights(tmp_path):
        found[name] = tensor.sum().item()
        most = max(most, mapped() - before)
    assert found == {name: tensor.sum().item() for name, tensor in weights.items()}
    assert most < 2**25


def test_shards_without_an_index_are_read_and_one_that_is_missing_is_named(tmp_path):
    for i in range(3):
        save_file(
            {f"w{i}": torch.full((2,), float(i))},
            tmp_path / f"model-{i + 1:05}-of-00003.safetensors",
        )
    found = dict(CheckpointWeights(tmp_path))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        f"w{i}": [float(i)] * 2 for i in range(3)
    }
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"lacks files of its weights that are missing: model-00002-of-00003\.safetensors\.",
    ):
        CheckpointWeights(tmp_path)
    save_file({"w": torch.zeros(1)}, tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="holds shards of several checkpoints"):
        CheckpointWeights(tmp_path)
