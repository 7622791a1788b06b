"""bitsandbytes: 4 bits with a value each (NF4, FP4) in blocks of 64, or 8 bits with a scale per
output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearSpec
from torch import Tensor

from toolkit_lm_quantization_formats.base import FormatQuantization, is_skipped, one_of
from toolkit_lm_quantization_formats.codes import FP4, NF4
from toolkit_lm_quantization_formats.schemes import Nibbles, Plain, Scheme

BLOCK = 64
_VALUES = {"nf4": NF4, "fp4": FP4}
_STATE = "quant_state.bitsandbytes__"
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_MOST_STATE = 2**16
"""Most bytes of the JSON that describes a tensor."""


class Config(Struct):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    llm_int8_skip_modules: list[str] | None = None


class BitsAndBytes(FormatQuantization):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = config = self.parse(Config)
        if config.load_in_4bit == config.load_in_8bit:
            raise CheckpointError(
                "quantization_config of config.json: one of load_in_4bit and load_in_8bit must be "
                "true"
            )
        self.kind = one_of("bnb_4bit_quant_type", config.bnb_4bit_quant_type.lower(), _VALUES)
        self.layout: Scheme = Plain(torch.int8, scale="SCB", rows=1, factor=1 / 127)
        if config.load_in_4bit:
            self.layout = Nibbles(
                group=BLOCK,
                codes="weight",
                scale="weight_absmax",
                scale_dtype=torch.float32,
                values=_VALUES[self.kind],
                marks=("weight.absmax",),
            )

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        skipped = [*(self.parsed.llm_int8_skip_modules or ()), "lm_head"]
        if not tensors and (spec.kind == "embedding" or is_skipped(source, skipped)):
            return None
        return self.layout

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Joins the tensors of each 4-bit weight, which may lie in several files, into codes and
        scales by output."""
        waiting: dict[str, dict[str, Tensor]] = {}
        for name, tensor in super().adapt(weights):
            module, _, last = name.rpartition(".")
            if last == "weight_format":
                if tensor.numel() != 1 or int(tensor) != 0:
                    raise CheckpointError(f"{name} is {tensor.tolist()}, and 0 (rows) is read")
            elif module.endswith(".weight.quant_state"):
                waiting.setdefault(module.removesuffix(".quant_state"), {})["state"] = tensor
            elif module.endswith(".weight") and last in _PARTS:
                waiting.setdefault(module, {})[last] = tensor
            elif last == "weight" and self.parsed.load_in_4bit and not _is_plain(tensor):
                waiting.setdefault(name, {})["weight"] = tensor
            else:
                yield name, tensor
                continue
            yield from self._joined(waiting)
        for name, parts in waiting.items():
            needed = {"weight", "absmax", "quant_map", "state"}
            if needed <= parts.keys():
                needed = {"nested_absmax", "nested_quant_map"}
            state = f"{_STATE}{self.kind}"
            lacking = {state if part == "state" else part for part in needed - parts.keys()}
            raise CheckpointError(
                f"{name} lacks tensors of its 4-bit weight: {', '.join(sorted(lacking))}"
            )

    def _joined(self, waiting: dict[str, dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name in list(waiting):
            parts = waiting[name]
            if not {"weight", "absmax", "quant_map", "state"} <= parts.keys():
                continue
            state = _state(f"{name}.{_STATE}{self.kind}", parts["state"])
            if (
                "nested_offset" in state
                and not {"nested_absmax", "nested_quant_map"} <= parts.keys()
            ):
                continue
            del waiting[name]
            yield name, _codes(name, parts["weight"], state)
            yield f"{name}_absmax", self._scales(name, parts, state)

    def _scales(self, name: str, parts: dict[str, Tensor], state: dict[str, Any]) -> Tensor:
        stated = torch.tensor(_VALUES[self.kind])
        values = parts["quant_map"].float()
        if (
            state["quant_type"] != self.kind
            or values.shape != stated.shape
            or not torch.allclose(values, stated, atol=1e-4)
        ):
            raise CheckpointError(
                f"{name}.quant_map has values of {state['quant_type']!r}, not those of "
                f"{self.kind!r}, which config.json says"
            )
        outputs, inputs = state["shape"]
        size = state["blocksize"]
        absmax = parts["absmax"]
        floats = [key for key in _PARTS if key != "absmax" or "nested_offset" not in state]
        for key in floats:
            if key in parts and not parts[key].is_floating_point():
                raise CheckpointError(f"{name}.{key} has dtype {parts[key].dtype}, not float32")
            if key in parts and not bool(torch.isfinite(parts[key]).all()):
                raise CheckpointError(f"{name}.{key} has values that are not finite")
        if "nested_offset" in state:
            codes = absmax.flatten()
            nested = parts["nested_absmax"].float()
            every = state["nested_blocksize"]
            if absmax.dtype is not torch.uint8:
                raise CheckpointError(f"{name}.absmax has dtype {absmax.dtype}, not uint8")
            if nested.shape != (count := -(-len(codes) // every),):
                raise CheckpointError(
                    f"{name}.nested_absmax has shape {list(nested.shape)}, not [{count}]"
                )
            if parts["nested_quant_map"].shape != (256,):
                raise CheckpointError(f"{name}.nested_quant_map has not shape [256]")
            found = parts["nested_quant_map"].float()[codes.int()]
            absmax = found * nested.repeat_interleave(every)[: len(codes)] + state["nested_offset"]
        if absmax.numel() * size != outputs * inputs or inputs % size or size % BLOCK:
            raise CheckpointError(
                f"{name}.absmax has {absmax.numel()} scales of {size} values each, in whole rows "
                f"of [{outputs}, {inputs}]: blocks are multiples of {BLOCK} that divide a row"
            )
        return absmax.float().view(outputs, -1).repeat_interleave(size // BLOCK, 1)


def _is_plain(tensor: Tensor) -> bool:
    """4-bit codes are stored as a column of bytes, or of another dtype's bytes."""
    return tensor.ndim != 2 or tensor.shape[1] != 1


def _state(name: str, stored: Tensor) -> dict[str, Any]:
    """The description of a 4-bit weight. Raises CheckpointError."""
    try:
        if stored.dtype is not torch.uint8 or stored.ndim != 1 or len(stored) > _MOST_STATE:
            raise ValueError(f"{stored.dtype} of shape {list(stored.shape)} holds no text")
        state = json.loads(bytes(stored.tolist()))
        outputs, inputs = state["shape"]
        sizes = [outputs, inputs, state["blocksize"], state.get("nested_blocksize", 1)]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"sizes {sizes}")
        float(state.get("nested_offset", 0))
        state["quant_type"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read: {error!r}") from None
    return dict(state)


def _codes(name: str, stored: Tensor, state: dict[str, Any]) -> Tensor:
    """[N, K / 2], the first code in the low bits."""
    outputs, inputs = state["shape"]
    data = stored.contiguous().view(torch.uint8)
    if data.numel() * 2 != outputs * inputs or inputs % 2:
        raise CheckpointError(
            f"{name} has {data.numel()} bytes, not those of [{outputs}, {inputs}] in 4 bits"
        )
    data = data.view(outputs, inputs // 2)
    return data << 4 | data >> 4
