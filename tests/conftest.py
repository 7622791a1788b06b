"""Small random checkpoints that transformers writes, for tests that span distributions."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
from llm_toolkit.testing import make_checkpoint


@pytest.fixture(scope="session")
def make_llama(tmp_path_factory):
    """A function (name, **LlamaConfig fields) -> (folder, transformers model in eval mode)."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str, save_options: dict[str, Any] | None = None, **fields: Any) -> tuple[Path, Any]:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        key = json.dumps([name, save_options, fields], sort_keys=True)
        if key not in made:
            shape = {
                "vocab_size": 272,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 2,
                "initializer_range": 0.2,
                "dtype": "float32",
            } | fields
            torch.manual_seed(0)
            model = LlamaForCausalLM(LlamaConfig(**shape)).to(getattr(torch, shape["dtype"])).eval()
            made[key] = make_checkpoint(tmp_path_factory.mktemp(name), model, **(save_options or {})), model
        return made[key]

    return make


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels of all distributions of this repository."""
    target = tmp_path_factory.mktemp("wheels")
    folders = [path.parent for pattern in ("", "core/", "plugins/*/", "contrib_*/*/") for path in ROOT.glob(f"{pattern}pyproject.toml")]
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "-w", target, *folders], check=True)
    return target


@pytest.fixture(scope="session")
def fresh_environment(wheels, tmp_path_factory) -> Path:
    """A virtual environment of its own with the wheels installed, and with what the tutorials need to be built and tested."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(environment, with_pip=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "hatchling", "pytest", *wheels.glob("*.whl")], check=True)
    return environment
