"""Adapters of llama.cpp, GGUF files of LoRA, converted to folders as PEFT saves them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors.torch import save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from toolkit_lm_commands import engine_command
from torch import Tensor

from toolkit_lm_gguf.config import family_of
from toolkit_lm_gguf.families import place_of
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.tensors import floats, in_halves

_PREFIX = "base_model.model."
_SUFFIX = re.compile(r"(.*)\.lora_([ab])")


@engine_command()
def convert_adapter(
    config: VllmConfig,
    plugins: Plugins,
    adapter: Annotated[Path, typer.Option(metavar="FILE", help="Adapter: a GGUF file.")],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write, new or empty.")],
) -> None:
    """Write a GGUF adapter of MODEL as a folder, as PEFT saves it."""
    resolved = resolve(config.replace(device="cpu"), plugins)
    count = convert(adapter, resolved.hf_config, out)
    typer.echo(f"{out}: an adapter of {count} layers.")


def convert(path: Path, hf_config: Mapping[str, Any], out: Path) -> int:
    """Writes a GGUF adapter to the folder `out`. `hf_config`: config.json of its model. Returns the
    number of layers. Raises ToolkitError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"the folder {str(out)!r} is there, and is not empty.")
    file = GGUFFile(path)
    kind = file.get("general.type", str, "model"), file.get("adapter.type", str, "lora")
    if kind != ("adapter", "lora"):
        file.fail(f"is of type {kind[0]!r} and of adapter type {kind[1]!r}, no adapter of LoRA")
    pairs = _pairs(file, hf_config)
    tensors = {
        f"{_PREFIX}{module}.lora_{letter.upper()}.weight": tensor.contiguous()
        for module, pair in pairs.items()
        for letter, tensor in pair.items()
    }
    ranks = {module: len(pair["a"]) for module, pair in pairs.items()}
    # Without an alpha, B A is added as it is.
    alpha = file.get("adapter.lora.alpha", float, 0.0)
    patterns = {rf"{re.escape(module)}": rank for module, rank in ranks.items()}
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": max(ranks.values()),
        "lora_alpha": alpha or max(ranks.values()),
        "rank_pattern": patterns,
        "alpha_pattern": {} if alpha else patterns,
        "target_modules": sorted(ranks),
        "base_model_name_or_path": file.find("general.base_model.0.name", str),
    }
    staged = out.with_name(f".{out.name}.staged")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        save_file(tensors, staged / "adapter_model.safetensors", metadata={"format": "pt"})
        (staged / "adapter_config.json").write_text(json.dumps(described, indent=2))
        if out.exists():
            out.rmdir()
        staged.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return len(pairs)


def _pairs(file: GGUFFile, hf_config: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """A ("a") and B ("b") of each module, in float32."""
    if file.find("adapter.alora.invocation_tokens", list):
        raise UnsupportedError(f"{file.path} is an aLoRA, which is read as PEFT saves it alone.")
    family = family_of(file)
    heads = hf_config.get("num_attention_heads")
    of_stems = {"attn_q": heads, "attn_k": hf_config.get("num_key_value_heads", heads)}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, info in file.tensors.items():
        found = _SUFFIX.fullmatch(name)
        place = None if found is None else place_of(family, found[1])
        if found is None or place is None or place.suffix != "weight" or len(info.shape) != 2:
            file.fail(f"holds {name}, which is no A or B of a linear layer of {family.model_type}")
        if place.stem == "token_embd" or place.is_stacked:
            raise UnsupportedError(f"{file.path}: {name}: only linear layers are converted.")
        tensor = floats(info).float()
        count = of_stems.get(place.stem)
        if family.is_permuted and found[2] == "b" and count is not None:
            if len(tensor) % (2 * count):
                file.fail(f"has {len(tensor)} rows of {name}, and the model has {count} heads")
            tensor = in_halves(tensor, count)
        pairs.setdefault(place.module, {})[found[2]] = tensor
    if not pairs:
        file.fail("holds no tensors")
    for module, pair in pairs.items():
        if len(pair) < 2 or len(pair["a"]) != pair["b"].shape[1]:
            file.fail(f"has an A and a B of {module} that do not go together, or one of them alone")
    return pairs
