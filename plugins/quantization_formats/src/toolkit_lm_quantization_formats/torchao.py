"""torchao, as transformers saves it in safetensors: integers of 1 to 8 bits in int8, and float8
e4m3, with a scale per weight, per output, per group of inputs, or per block."""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import LinearSpec
from toolkit_lm_weights.patterns import matches

from toolkit_lm_quantization_formats.base import FormatQuantization, group_of, matched, one_of
from toolkit_lm_quantization_formats.schemes import Plain, Scheme
from toolkit_lm_quantization_formats.stored import FP8

_INT8 = (
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8StaticActivationInt8WeightConfig",
)
_FLOAT8 = (
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8StaticActivationFloat8WeightConfig",
)
_INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_BITS = {f"int{bits}": bits for bits in range(1, 9)}
_OTHERS = "_default"
"""Name of the config of modules that none names."""


class Stated(Struct, rename={"type": "_type", "data": "_data", "version": "_version"}):
    """An object of torchao, as it is written to config.json: a class and its fields."""

    type: str
    data: Any = None
    version: int = 1

    def fields(self) -> dict[str, Any]:
        return self.data if isinstance(self.data, dict) else {}


class Config(Struct):
    quant_type: dict[str, Stated]


class TorchAo(FormatQuantization):
    """One config for all layers, or configs for names of modules, or for those that a regular
    expression after "re:" matches. Activations are not quantized, whatever it says."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        stated = self.parse(Config).quant_type.get("default")
        if stated is None:
            raise CheckpointError("quantization_config of config.json: quant_type has no 'default'")
        self.schemes: dict[str, Scheme | None] = {}
        """Schemes by name of module."""
        if stated.type in _BY_NAME:
            fields = stated.fields()
            named = fields.get("fqn_to_config") or fields.get("module_fqn_to_config") or {}
            for name, config in self.parse(dict[str, Stated | None], named).items():
                self.schemes[name] = None if config is None else self._stated_scheme(config)
        else:
            self.schemes[_OTHERS] = self._stated_scheme(stated)

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        if not tensors and spec.kind in ("embedding", "lm_head"):
            return None
        if source in self.schemes:
            return self.schemes[source]
        for name, scheme in self.schemes.items():
            if name.startswith("re:") and matched(
                matches, "fqn_to_config", name[3:], source, prefix="re:"
            ):
                return scheme
        return self.schemes.get(_OTHERS)

    def _stated_scheme(self, stated: Stated) -> Scheme:
        """Raises UnsupportedError."""
        one_of("quant_type", stated.type, [*_INT8, *_FLOAT8, *_INTX])
        fields = stated.fields()
        if stated.type in _INTX:
            packing = self._value(fields, "intx_packing_format", "UNPACKED_TO_INT8")
            one_of("intx_packing_format", packing, ["UNPACKED_TO_INT8"])
            is_weight_only = stated.type == _INTX[0]
            name = "granularity" if is_weight_only else "weight_granularity"
            bits = _BITS[one_of("weight_dtype", self._value(fields, "weight_dtype", "int8"), _BITS)]
            # A group has 32 inputs by default.
            where = fields.get(name) or {"_type": "PerGroup", "_data": {"group_size": 32}}
            return self._plain(torch.int8, bits, where)
        if stated.version < 2:
            raise UnsupportedError(
                f"quantization_config of config.json: {stated.type} is of version "
                f"{stated.version}, whose tensors are read by torchao alone. Quantize the weights "
                "with torchao 0.15 or newer"
            )
        where = fields.get("granularity") or {"_type": "PerRow"}
        if stated.type in _INT8:
            return self._plain(torch.int8, 8, where)
        dtype = self._value(fields, "weight_dtype", "float8_e4m3fn")
        one_of("weight_dtype", dtype, ["float8_e4m3fn"])
        # One for activations, and one for weights.
        return self._plain(FP8, 8, where[-1] if isinstance(where, list) and where else where)

    def _plain(self, dtype: torch.dtype, bits: int, where: Any) -> Scheme:
        granularity = self.parse(Stated, where)
        fields = granularity.fields()
        rows: int | None = 1
        group = None
        kind = one_of(
            "granularity",
            granularity.type,
            ["PerTensor", "PerRow", "PerAxis", "PerGroup", "PerBlock"],
        )
        if kind == "PerTensor":
            rows = None
        elif kind == "PerAxis":
            one_of("axis of granularity", fields.get("axis"), [0])
        elif kind == "PerGroup":
            group = group_of(self.parse(int, fields.get("group_size")))
        elif kind == "PerBlock":
            sizes = self.parse(tuple[int, int], fields.get("block_size"))
            rows, group = (group_of(size) or 1 for size in sizes)
        return Plain(
            dtype=dtype,
            bits=bits,
            codes="_weight_qdata",
            scale="_weight_scale",
            zero="_weight_zero_point",
            rows=rows,
            group=group,
            # Integers have zeros, those of symmetric ones too.
            symmetric=dtype is FP8,
        )

    def _value(self, fields: dict[str, Any], name: str, default: str) -> str:
        """An enumeration's or a dtype's name."""
        found = fields.get(name)
        return default if found is None else str(self.parse(Stated, found).data)
