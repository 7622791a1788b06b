"""Finds a checkpoint's folder and reads its JSON files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from llm_toolkit.config import Checkpoint, VllmConfig
from llm_toolkit.errors import CheckpointError, nearest
from llm_toolkit.plugin import Plugins

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(model: str, revision: str | None, plugins: Plugins) -> Path:
    """The folder of MODEL: a name that a plugin registers, a local folder, or a hub id. Raises CheckpointError."""
    if model in plugins.checkpoints:
        return Path(plugins.checkpoints.path(model))
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(
            f"model {model!r} is a file; it must be a folder in Hugging Face layout (config.json, *.safetensors, tokenizer.json)."
        )
    if _HUB_ID.fullmatch(model):
        return _download(model, revision)
    raise CheckpointError(
        f"model {model!r} is no folder, no hub id of the form owner/name, and no name that a plugin registers. "
        f"{nearest(model, plugins.checkpoints.keys())}"
    )


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(
            f"model {model!r} is no local folder, and could not be had from the hub: {type(error).__name__}: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises CheckpointError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{str(path.parent)!r} has no {path.name}: it is no checkpoint in Hugging Face layout.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{str(path)!r} must hold a JSON object, not a {type(data).__name__}.")
    return data


def read_checkpoint(config: VllmConfig, plugins: Plugins) -> Checkpoint:
    """What the checkpoint's folder says of the model. Raises CheckpointError, naming the file or the architecture."""
    folder = find_folder(config.model.model, config.model.revision, plugins)
    hf_config = read_json(folder / "config.json")
    for key in ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers"):
        if type(hf_config.get(key, 1)) is not int:
            raise CheckpointError(f"{str(folder / 'config.json')!r}: {key} must be an integer, not {hf_config[key]!r}.")
    generation = folder / "generation_config.json"
    return Checkpoint(
        path=str(folder),
        architecture=_architecture(hf_config, folder, plugins),
        hf_config=hf_config,
        generation_config=read_json(generation) if generation.exists() else {},
    )


def _architecture(hf_config: dict[str, Any], folder: Path, plugins: Plugins) -> str:
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(a, str) for a in architectures):
        raise CheckpointError(f"{str(folder / 'config.json')!r} names no model class: 'architectures' is {architectures!r}.")
    for architecture in architectures:
        if architecture in plugins.models:
            return str(architecture)
    name = architectures[0]
    broken = [info.name for info in plugins.infos if info.status == "broken"]
    hint = f" Broken plugins, which might have it: {', '.join(broken)} (see `toolkit plugins list`)." if broken else ""
    raise CheckpointError(
        f"no installed plugin has the architecture {name!r} of {str(folder)!r}. {nearest(name, plugins.models.keys())}{hint} "
        "Install a distribution that registers it (llm-toolkit-...), or write one: docs/hooks/toolkit_register_models.md."
    )
