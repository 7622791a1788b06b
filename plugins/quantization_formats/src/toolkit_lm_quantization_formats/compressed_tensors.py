"""compressed-tensors, which llm-compressor writes."""

from __future__ import annotations

import torch
from msgspec import Struct, field
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import LinearSpec
from toolkit_lm_weights.patterns import begins

from toolkit_lm_quantization_formats.base import FormatQuantization, group_of, matched, one_of
from toolkit_lm_quantization_formats.schemes import Nibbles, PackedRows, Plain, Scheme

_CLASSES = {"embedding": "Embedding"}
"""Kind of layer -> name of its class in the config, "Linear" for the others."""


class Weights(Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None
    actorder: str | bool | None = None


class Group(Struct):
    targets: list[str]
    weights: Weights | None = None
    format: str | None = None


class Config(Struct):
    config_groups: dict[str, Group]
    format: str | None = None
    ignore: list[str] = field(default_factory=list)
    kv_cache_scheme: Weights | None = None
    sparsity_config: dict[str, object] | None = None
    transform_config: dict[str, object] | None = None


class CompressedTensors(FormatQuantization):
    """Each group of layers has a scheme. Its targets are names of modules, "re:" and a regular
    expression, or classes of modules, in this order."""

    follows_tensors = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = self.parse(Config)
        sparsity = (self.parsed.sparsity_config or {}).get("format", "dense")
        one_of("sparsity_config.format", sparsity, ["dense"])
        if (self.parsed.transform_config or {}).get("config_groups"):
            raise UnsupportedError(
                "quantization_config of config.json: transform_config rotates activations, which "
                "nothing here does. Quantize without it"
            )
        self.kv_dtype = self.kv_dtype_of(self.parsed.kv_cache_scheme)
        self.schemes = {
            name: _scheme(group, self.parsed.format)
            for name, group in self.parsed.config_groups.items()
        }

    def kv_dtype_of(self, stated: Weights | None) -> str | None:
        if stated is None:
            return None
        found = stated.num_bits, stated.type, stated.strategy or "tensor"
        return self.fp8_cache("kv_cache_scheme", found == (8, "float", "tensor"))

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        kind = _CLASSES.get(spec.kind, "Linear")
        if any(_names(target, source) or target == kind for target in self.parsed.ignore):
            return None
        for is_target in (
            lambda target: target == source,
            lambda target: _names(target, source),
            lambda target: target == kind,
        ):
            for name, group in self.parsed.config_groups.items():
                if any(map(is_target, group.targets)):
                    return self.schemes[name]
        return None


def _names(target: str, source: str) -> bool:
    if not target.startswith("re:"):
        return target == source
    return matched(begins, "targets or ignore", target[3:], source, prefix="re:")


def _scheme(group: Group, stated: str | None) -> Scheme | None:
    """The scheme of a group; None: its weights are floats."""
    weights = group.weights
    if weights is None:
        return None
    form = one_of("format", group.format or stated or "", _FORMATS)
    kind = one_of("weights.type", weights.type, ["int", "float"])
    if form in _NIBBLES:
        if (kind, weights.num_bits, weights.symmetric) != ("float", 4, True):
            raise CheckpointError(
                f"quantization_config of config.json: {form} has floats of 4 bits"
            )
        return _NIBBLES[form]
    strategy = one_of(
        "weights.strategy", _strategy(weights), ["tensor", "channel", "group", "block"]
    )
    size = group_of(weights.group_size) if strategy == "group" else None
    if form == "pack-quantized":
        one_of("weights.type", kind, ["int"])
        one_of("weights.num_bits", weights.num_bits, range(1, 9))
        if strategy == "block":
            one_of("weights.strategy", strategy, ["tensor", "channel", "group"])
        return PackedRows(
            bits=weights.num_bits,
            group=size,
            symmetric=weights.symmetric,
            ordered=weights.actorder in ("group", "dynamic", True),
            per_tensor=strategy == "tensor",
        )
    block = weights.block_structure
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2 and min(block) > 0):
        raise CheckpointError(
            "quantization_config of config.json: weights.block_structure must be two sizes, not "
            f"{block!r}"
        )
    one_of("weights.num_bits", weights.num_bits, range(2, 9) if kind == "int" else [8])
    rows = {"tensor": None, "channel": 1, "group": 1}.get(strategy)
    if isinstance(block, list) and strategy == "block":
        rows, size = block
    return Plain(
        dtype=torch.int8 if kind == "int" else torch.float8_e4m3fn,
        bits=weights.num_bits,
        rows=rows,
        group=size,
        symmetric=weights.symmetric,
        exponents=form == "mxfp8-quantized",
    )


def _strategy(weights: Weights) -> str:
    if weights.strategy is not None:
        return weights.strategy
    if weights.group_size is None:
        return "tensor"
    return "channel" if weights.group_size == -1 else "group"


_NIBBLES = {
    "nvfp4-pack-quantized": Nibbles(group=16, whole_scale="weight_global_scale", divides=True),
    "mxfp4-pack-quantized": Nibbles(group=32, scale_dtype=torch.uint8),
}
_FORMATS = [
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    *_NIBBLES,
]
