"""Folders that hold no adapter that fits: the error names the file, the tensor and what is
expected."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from lora_adapters import Adapters
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import CheckpointError
from toolkit_lm_lora.files import AdapterConfig, AdapterFolder

LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    return Adapters(
        tmp_path_factory.mktemp("files"), "llama", {"good": {"target_modules": ["q_proj"]}}
    )


@pytest.fixture
def folder(adapters, tmp_path):
    return shutil.copytree(adapters.paths["good"], tmp_path / "bad")


def configure(folder, **fields):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', not 'LORA'"),
        ({"r": 0}, "r and each rank of rank_pattern must be at least 1"),
        ({"r": "many"}, r"adapter_config\.json: .*r"),
        ({"bias": "some"}, "bias is 'some', not 'none', 'all' or 'lora_only'"),
        ({"target_modules": "(q_proj"}, r"'\(q_proj' is no pattern"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is set, which is not supported"),
        (
            {"alora_invocation_tokens": [1], "use_dora": True},
            "alora_invocation_tokens are supported for A and B of linear layers alone",
        ),
        *(
            (
                {"init_lora_weights": how},
                "Convert the adapter with PEFT: model.save_pretrained.*"
                "path_initial_model_for_weight_conversion",
            )
            for how in ("pissa_niter_4", "olora", "corda", "loftq")
        ),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_run(folder, fields, wrong):
    configure(folder, **fields)
    with pytest.raises(CheckpointError, match=wrong):
        AdapterFolder(folder)


def test_files_that_are_none(folder):
    with pytest.raises(CheckpointError, match="there is no such folder"):
        AdapterFolder(folder / "nowhere")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for contents in (b"", whole[:50], whole[:-1], b"\xff" * 64):
        weights.write_bytes(contents)
        with pytest.raises(CheckpointError, match="is cut off"):
            AdapterFolder(folder)
    weights.write_bytes((8).to_bytes(8, "little") + b"[1, 2, 3")
    with pytest.raises(CheckpointError, match="its header is not that of safetensors"):
        AdapterFolder(folder)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="a pickle, which may run any code, and is not read"):
        AdapterFolder(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        AdapterFolder(folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read: No such file"):
        AdapterFolder(folder)


def test_the_digest_is_of_the_contents(adapters, folder):
    whole = AdapterFolder(adapters.paths["good"]).digest
    assert AdapterFolder(folder).digest == whole
    configure(folder, lora_alpha=9)
    assert AdapterFolder(folder).digest != whole


def drop(name):
    return lambda tensors: tensors.pop(name)


def rename(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:2].contiguous()})


BROKEN = {
    "B missing": (
        drop(f"{LAYER}.lora_B.weight"),
        r"tensor '.*q_proj\.lora_A\.weight': .*q_proj\.lora_B\.weight is missing",
    ),
    "a layer missing": (
        lambda tensors: [tensors.pop(f"{LAYER}.lora_{one}.weight") for one in "AB"],
        r"there is no tensor base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A",
    ),
    "another rank": (
        cut(f"{LAYER}.lora_A.weight"),
        r"shape is \[2, 64\], but rank 4 of .* needs \[4, 64\]",
    ),
    "another base": (
        cut(f"{LAYER}.lora_B.weight"),
        r"shape is \[2, 4\], but rank 4 of .* needs \[64, 4\]",
    ),
    "no such module": (
        lambda tensors: [
            tensors.update({f"base_model.model.tower.lora_{one}.weight": tensors.pop(old)})
            for one in "AB"
            for old in [f"{LAYER}.lora_{one}.weight"]
        ],
        r"the model has no module 'tower'",
    ),
    "no such tensor": (
        rename(f"{LAYER}.lora_A.weight", f"{LAYER}.hada_w1_a"),
        "no tensor of LoRA has such a name",
    ),
}


@pytest.fixture(scope="module")
def llm(adapters):
    with adapters.llm({"max_rank": 8}) as made:
        yield made


def test_adapters_that_do_not_fit(adapters, llm, tmp_path):
    """A request with one ends with the error, and others are unharmed."""
    [good] = adapters.ask(llm, "good")
    adapters.assert_is(good, "good")
    for case, (breaks, wrong) in BROKEN.items():
        folder = shutil.copytree(adapters.paths["good"], tmp_path / case)
        tensors = load_file(folder / "adapter_model.safetensors")
        breaks(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
        adapters.paths[case] = folder
        found, beside = adapters.ask(llm, case, "good")
        assert re.search(wrong, found.error), (case, found.error)
        assert f"{case}'" in found.error
        adapters.assert_is(beside, "good")
        shutil.rmtree(folder)
        shutil.copytree(adapters.paths["good"], folder)
    configure(folder, r=16)
    adapters.paths["wide"] = folder
    [found] = adapters.ask(llm, "wide")
    assert "has rank 16, and the option max_rank of the plugin lora is 8" in found.error


def test_layers_pattern():
    for pattern, wanted in (("layers", True), ("blocks|layers", True), ("h", False), (None, True)):
        config = AdapterConfig(
            peft_type="LORA",
            target_modules=["q_proj"],
            layers_to_transform=[0],
            layers_pattern=pattern,
        )
        assert config.targets("model.layers.0.self_attn.q_proj") == wanted
        assert not config.targets("model.layers.1.self_attn.q_proj")


def test_a_pattern_that_takes_long_is_matched_all_the_same():
    config = AdapterConfig(peft_type="LORA", target_modules="(a+)+b", rank_pattern={"(a+)+b": 2})
    assert not config.targets("a" * 60) and config.rank("a" * 60) == 8
