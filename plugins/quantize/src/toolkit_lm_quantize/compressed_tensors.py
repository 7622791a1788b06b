"""Writes checkpoints in the format of compressed-tensors, which other projects read, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm_weights.writer import CheckpointWriter, Original, WeightScheme, WrittenTensors
from torch import Tensor

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt")
"""Files of a checkpoint that hold its weights."""
_TILE = 2**22
"""Weights that are quantized at a time."""


class CompressedTensorsWriter(CheckpointWriter):
    """Quantizes linear layers and experts, and copies all other files.

    Embeddings, heads, and layers that choose experts stay as they are: other projects expect them
    so.
    """

    def __init__(self, original: Original) -> None:
        super().__init__(original)
        self.schemes: dict[str, WeightScheme] = {}
        self.kept: list[str] = []
        for name, layer in original.layers.items():
            is_wanted = layer.kind in ("linear", "experts") and not layer.chooses_experts
            if is_wanted and layer.scheme is not None:
                self.schemes[name] = layer.scheme
            else:
                self.kept.append(name)
        if not self.schemes:
            load = original.config.load
            raise ConfigError(
                "compressed-tensors needs to know how, and no layer of "
                f"{original.config.model.model!r} is to be quantized: quantization="
                f"{load.quantization!r}. Able: fp8, int4, int8."
            )

    def write(self, folder: Path, shard_bytes: int) -> WrittenTensors:
        shards = _Shards(folder, shard_bytes)
        num_original_bytes = 0
        for name, tensor in self.original.weights:
            num_original_bytes += tensor.nbytes
            module = name.removesuffix(".weight")
            scheme = None if module == name else self.schemes.get(module)
            if scheme is None:
                shards.add({name: tensor.clone()})
                continue
            try:
                stored = compress(tensor, scheme)
            except CheckpointError as error:
                raise CheckpointError(f"{self.original.weights}: {name} {error}") from None
            shards.add({f"{module}.{key}": part for key, part in stored.items()})
        shards.finish()
        stated = dict(self.original.config.hf_config)
        stated["quantization_config"] = quantization_config(self.schemes, self.kept)
        _copy_others(self.original.folder, folder, stated)
        counts = [str(scheme) for scheme in self.schemes.values()]
        return WrittenTensors(
            num_bytes=shards.num_bytes,
            num_original_bytes=num_original_bytes,
            quantized={name: counts.count(name) for name in dict.fromkeys(counts)},
            kept=self.kept,
        )


def compress(weight: Tensor, scheme: WeightScheme) -> dict[str, Tensor]:
    """The tensors of a weight [N, K], by their names beside it. Scales have its dtype, and codes
    are the nearest for these. Raises CheckpointError."""
    rows = torch.split(weight, max(1, _TILE // weight.shape[1]))
    parts = [scheme.rounded(tile, weight.dtype) for tile in rows]
    scales = torch.cat([part[1] for part in parts])
    if scheme.name == "fp8":
        codes = torch.cat([codes.to(torch.float8_e4m3fn) for codes, _ in parts])
        return {"weight": codes, "weight_scale": scales}
    bits = 4 if scheme.name == "int4" else 8
    packed = torch.cat([_words(codes, bits) for codes, _ in parts])
    return {
        "weight_packed": packed,
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes [N, K] -> int32 [N, K * bits / 32]: 32 / bits of them in each, 2^(bits - 1) above the
    code, the first in the lowest bits. A last one that is not full has zeros."""
    per_word = 32 // bits
    raised = codes.to(torch.int32) + 2 ** (bits - 1)
    raised = torch.nn.functional.pad(raised, (0, -raised.shape[1] % per_word))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    words = raised.reshape(len(raised), -1, per_word) << shifts
    return words.sum(-1, dtype=torch.int32)


def quantization_config(plan: Mapping[str, WeightScheme], kept: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. The scheme of most modules is that of all linear
    ones, and others name theirs."""
    of_scheme: dict[WeightScheme, list[str]] = {}
    for name, scheme in plan.items():
        of_scheme.setdefault(scheme, []).append(name)
    ordered = sorted(of_scheme.items(), key=lambda item: -len(item[1]))
    groups = {
        f"group_{index}": {
            "targets": ["Linear"] if index == 0 else names,
            "weights": _arguments(scheme),
            "input_activations": None,
            "output_activations": None,
            "format": _format(scheme),
        }
        for index, (scheme, names) in enumerate(ordered)
    }
    formats = {_format(scheme) for scheme in of_scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _format(scheme: WeightScheme) -> str:
    return "float-quantized" if scheme.name == "fp8" else "pack-quantized"


def _arguments(scheme: WeightScheme) -> dict[str, Any]:
    return {
        "num_bits": 4 if scheme.name == "int4" else 8,
        "type": "float" if scheme.name == "fp8" else "int",
        "symmetric": True,
        "strategy": "channel" if scheme.group is None else "group",
        "group_size": scheme.group,
        "dynamic": False,
    }


def _copy_others(source: Path, out: Path, config: dict[str, Any]) -> None:
    """Copies what is beside the weights: tokenizer, chat template, generation config."""
    for path in sorted(source.iterdir()):
        is_weights = any(path.match(pattern) for pattern in _WEIGHTS)
        if path.is_file() and not is_weights and path.name != "config.json":
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _Shards:
    """Safetensors files of about equal size, and their index."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self.num_bytes = 0
        self._held: dict[str, Tensor] = {}
        self._of_files: list[list[str]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        held = sum(tensor.nbytes for tensor in self._held.values())
        new = sum(tensor.nbytes for tensor in tensors.values())
        if self._held and held + new > self.limit:
            self._write()
        self._held |= tensors
        self.num_bytes += new

    def finish(self) -> None:
        """Writes the rest, and gives the files their names."""
        self._write()
        if len(self._of_files) == 1:
            (self.folder / "shard-0").rename(self.folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._of_files):
            name = f"model-{index + 1:05}-of-{len(self._of_files):05}.safetensors"
            (self.folder / f"shard-{index}").rename(self.folder / name)
            places |= dict.fromkeys(names, name)
        index_json = {"metadata": {"total_size": self.num_bytes}, "weight_map": places}
        (self.folder / "model.safetensors.index.json").write_text(
            json.dumps(index_json, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

    def _write(self) -> None:
        contiguous = {name: tensor.contiguous() for name, tensor in self._held.items()}
        path = self.folder / f"shard-{len(self._of_files)}"
        # It is for its owner alone: others may read it as they may what is beside it.
        path.touch()
        mode = path.stat().st_mode
        save_file(contiguous, path, metadata={"format": "pt"})
        path.chmod(mode)
        self._of_files.append(list(self._held))
        self._held = {}
