"""Checkpoints that the families take, and their errors for those that they cannot take."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import toolkit_lm_moe
import torch
from moe_families import FAMILIES, SPLIT, make_mixtral, make_qwen3_moe, reference_logits
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.plugin import ModelRegistry, PluginInfo
from toolkit_lm_decoder.llama import LlamaMLP
from toolkit_lm_devkit import load_checkpoint, logits_of, randomize
from toolkit_lm_moe.qwen3_moe import Qwen3MoeBlock
from toolkit_lm_weights.safetensors import CheckpointWeights

INPUT_IDS = torch.arange(3, 40)
BLOCKS = {"mixtral": "model.layers.1.block_sparse_moe.", "qwen3_moe": "model.layers.1.mlp."}
PROJECTIONS = {"mixtral": ("w1", "w3", "w2"), "qwen3_moe": ("gate_proj", "up_proj", "down_proj")}


@pytest.fixture(params=SPLIT)
def family(request):
    return request.param


@pytest.fixture
def model_cls(family):
    return FAMILIES[family][0]


@pytest.fixture
def theirs(family):
    model = {"mixtral": make_mixtral, "qwen3_moe": make_qwen3_moe}[family]()
    randomize(model)
    return model


@pytest.fixture
def folder(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    """Rewrites the weights of a checkpoint by `change`, a function that edits the mapping of names
    to tensors."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def edit_config(folder, **changes):
    file = folder / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in values.items() if value != "removed"}))


def fuse(folder, family):
    """Puts all experts of a layer into one tensor, as transformers holds them in memory."""
    gate, up, down = PROJECTIONS[family]

    def change(tensors):
        for layer in range(2):
            block = BLOCKS[family].replace("1", str(layer))
            stacks = [
                torch.stack([tensors.pop(f"{block}experts.{i}.{name}.weight") for i in range(4)])
                for name in (gate, up, down)
            ]
            renamed = f"model.layers.{layer}.mlp."
            tensors[f"{renamed}experts.gate_up_proj"] = torch.cat(stacks[:2], dim=1)
            tensors[f"{renamed}experts.down_proj"] = stacks[2]
            tensors[f"{renamed}gate.weight"] = tensors.pop(f"{block}gate.weight")

    edit(folder, change)


def refusal(model_cls, folder, **options) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(model_cls, folder, **options)
    return str(caught.value)


def test_a_checkpoint_of_fused_experts(family, model_cls, theirs, folder):
    fuse(folder, family)
    ours = logits_of([load_checkpoint(model_cls, folder)], INPUT_IDS)
    torch.testing.assert_close(ours, reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("divides_experts", [False, True], ids=["cut experts", "whole experts"])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_shards_of_fused_and_split_checkpoints_are_equal(
    rank, divides_experts, family, model_cls, folder
):
    options = {"tensor_parallel_size": 4, "enable_expert_parallel": divides_experts}
    config = VllmConfig.default(
        json.loads((folder / "config.json").read_text()), **options
    ).with_rank(rank)

    def shard():
        model = model_cls(vllm_config=config)
        model.load_weights(CheckpointWeights(folder))
        return model.state_dict()

    split = shard()
    fuse(folder, family)
    fused = shard()
    assert split.keys() == fused.keys()
    assert all(torch.equal(split[name], fused[name]) for name in split)


def test_a_missing_expert_is_named(family, model_cls, folder):
    names = [f"{BLOCKS[family]}experts.2.{name}.weight" for name in PROJECTIONS[family]]
    edit(folder, lambda tensors: [tensors.pop(name) for name in names])
    expected = sorted(name.replace("block_sparse_moe", "mlp") for name in names)
    assert refusal(model_cls, folder).endswith(f": 3 missing: {', '.join(expected)}.")


def test_an_expert_too_many_is_named(family, model_cls, folder):
    gate = PROJECTIONS[family][0]
    edit(
        folder,
        lambda tensors: tensors.update(
            {f"{BLOCKS[family]}experts.4.{gate}.weight": torch.zeros(1)}
        ),
    )
    assert refusal(model_cls, folder).endswith(
        f": 1 unexpected: model.layers.1.mlp.experts.4.{gate}.weight."
    )


def test_an_expert_of_another_shape_is_named(family, model_cls, theirs, folder):
    down = PROJECTIONS[family][2]
    inner = theirs.model.layers[0].mlp.experts.down_proj.shape[2]
    edit(
        folder,
        lambda tensors: tensors.update(
            {f"{BLOCKS[family]}experts.0.{down}.weight": torch.zeros(64, 5)}
        ),
    )
    expected = (
        f": 1 not fitting: model.layers.1.mlp.experts.0.{down}.weight has shape [64, 5], not "
        f"[64, {inner}]."
    )
    assert refusal(model_cls, folder).endswith(expected)


def test_fused_experts_that_do_not_fit_are_named(family, model_cls, folder):
    fuse(folder, family)

    def change(tensors):
        tensors["model.layers.0.mlp.experts.down_proj"] = tensors[
            "model.layers.0.mlp.experts.down_proj"
        ][:3].clone()
        tensors["model.layers.1.mlp.experts.gate_up_proj"] = tensors[
            "model.layers.1.mlp.experts.gate_up_proj"
        ][0]

    edit(folder, change)
    message = refusal(model_cls, folder)
    gate, _, down = PROJECTIONS[family]
    assert "9 missing" in message
    assert f"model.layers.0.mlp.experts.3.{down}.weight" in message
    assert f"model.layers.1.mlp.experts.0.{gate}.weight" in message
    assert message.endswith("1 unexpected: model.layers.1.mlp.experts.gate_up_proj.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_experts_per_tok": 5},
            r"'num_experts_per_tok' must be 1 to 4 \(the experts\), not 5",
        ),
        ({"num_experts_per_tok": 0}, "'num_experts_per_tok' must be 1 to 4"),
        ({"num_experts_per_tok": "removed"}, "config.json has no 'num_experts_per_tok'"),
        ({"num_local_experts": "removed"}, "config.json has no 'num_experts'"),
        ({"num_local_experts": 10**9}, "'num_experts' must be 0 to 4096, not 1000000000"),
    ],
)
def test_a_config_that_does_not_do_is_refused_by_name(model_cls, folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(model_cls, folder)


def test_inner_dimensions_that_do_not_split_are_refused_by_name(family, model_cls, folder):
    key = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}[family]
    edit_config(folder, **{key: 97})
    with pytest.raises(
        ConfigError,
        match=r"inner dimensions of model\.layers\.0\.mlp\.experts: 97 cannot be split evenly",
    ):
        load_checkpoint(model_cls, folder, tensor_parallel_size=2)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_either_name_states_the_experts(key, model_cls, theirs, folder):
    edit_config(folder, **{"num_experts": "removed", "num_local_experts": "removed", key: 4})
    ours = logits_of([load_checkpoint(model_cls, folder)], INPUT_IDS)
    torch.testing.assert_close(ours, reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "routed"),
    [
        ({}, [True, True, True, True]),
        ({"decoder_sparse_step": 2}, [False, True, False, True]),
        ({"decoder_sparse_step": 3}, [False, False, True, False]),
        ({"mlp_only_layers": [1, 3]}, [True, False, True, False]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False]),
        ({"num_local_experts": 0}, [False, False, False, False]),
    ],
)
def test_config_says_which_layers_of_qwen3_moe_are_routed(changes, routed):
    hf_config = make_qwen3_moe(num_hidden_layers=4).config.to_dict() | changes
    model = FAMILIES["qwen3_moe"][0](vllm_config=VllmConfig.default(hf_config))
    assert [type(layer.mlp) for layer in model.model.layers] == [
        Qwen3MoeBlock if one else LlamaMLP for one in routed
    ]


def test_the_family_of_the_readme_is_mixtral_by_other_names(tmp_path):
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    namespace = {"__name__": "readme"}
    exec(re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1), namespace)
    theirs = make_mixtral()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    fuse(tmp_path, "mixtral")
    ours = load_checkpoint(namespace["RoutedLlamaForCausalLM"], tmp_path)
    torch.testing.assert_close(
        logits_of([ours], INPUT_IDS), reference_logits(theirs, INPUT_IDS), atol=1e-4, rtol=0
    )


def test_the_entry_module_registers_the_classes():
    models = ModelRegistry(owner=PluginInfo("moe", "toolkit-lm-moe"))
    toolkit_lm_moe.toolkit_register_models(models)
    for model_cls, _ in FAMILIES.values():
        assert models.load(model_cls.__name__) is model_cls


def test_the_entry_module_is_light():
    code = (
        "import sys, toolkit_lm_moe; sys.exit('torch' in sys.modules or 'toolkit_lm_decoder' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
