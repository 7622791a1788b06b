"""Small models, and checkpoints of them in each format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from layouts import FORMATS
from toolkit_lm_devkit import write_checkpoint

SHAPE = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    reference: torch.nn.Module
    """transformers' model with the weights that the checkpoint stands for."""
    method: str

    def config(self) -> dict:
        return json.loads((self.folder / "config.json").read_text())


def is_projection(name, tensor):
    return tensor.ndim == 2 and "embed" not in name and ".gate." not in name


def write(folder, model, name, *, which=is_projection, **stated):
    """The checkpoint of a model in a format, with the weights that `which` picks."""
    form = FORMATS[name]
    return write_mixed(
        folder,
        model,
        form.config | stated,
        lambda key, tensor: form.write if which(key, tensor) else None,
    )


def write_mixed(folder, model, stated, writer_of):
    """The checkpoint of a model whose config states `stated`. `writer_of` gives the writer of each
    weight, None for floats."""
    weights = {}
    dense = {}
    for key, tensor in model.state_dict().items():
        writer = writer_of(key, tensor)
        if writer is None:
            weights[key] = dense[key] = tensor
            continue
        tensors, dense[key] = writer(tensor)
        weights |= {key.removesuffix("weight") + one: stored for one, stored in tensors.items()}
    config = model.config.to_dict() | {
        "architectures": [type(model).__name__],
        "quantization_config": stated,
        "dtype": "float32",
    }
    write_checkpoint(folder, config, weights)
    reference = type(model)(model.config).eval()
    reference.load_state_dict(dense)
    return Checkpoint(folder, reference, stated["quant_method"])


@pytest.fixture(scope="session")
def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()


@pytest.fixture
def mixed(llama, tmp_path):
    """A function from a config, and from the writer of each projection by its name, to a Llama."""

    def make(stated, writer_of):
        return write_mixed(
            tmp_path,
            llama,
            stated,
            lambda key, tensor: writer_of(key) if is_projection(key, tensor) else None,
        )

    return make


@pytest.fixture(scope="session")
def written(llama, tmp_path_factory):
    """A function from the name of a format to a Llama in it."""
    made: dict[str, Checkpoint] = {}

    def find(name):
        if name not in made:
            made[name] = write(tmp_path_factory.mktemp("format"), llama, name)
        return made[name]

    return find
