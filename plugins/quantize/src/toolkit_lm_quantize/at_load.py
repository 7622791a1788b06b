"""Quantization of weights of floats while they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import (
    LinearMethod,
    LinearSpec,
    Quantization,
    QuantizedReader,
    QuantizedWeight,
    Shard,
    ShardLoader,
    new_parameter,
)
from torch import Tensor, nn

from toolkit_lm_quantize import Options
from toolkit_lm_quantize.cache import Cache, open_cache
from toolkit_lm_quantize.patterns import Patterns
from toolkit_lm_quantize.schemes import GROUP_SIZES, SCHEMES, Int4Scheme, Int8Scheme, Scheme

_TILE = 2**20
"""Weights that are quantized at a time: what is used meanwhile does not depend on the layer."""
_FINE = ("embedding", "lm_head")
"""Kinds of layers that int4 stores in int8: each token depends on one row of them."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last parts of names of layers that choose experts, which int4 stores in int8, too: they are
small, and another choice is another answer."""


class QuantizingReader(QuantizedReader):
    """Quantizes the tensors of a checkpoint as they arrive. Or finds them in the cache, where the
    checkpoint's are not read."""

    def __init__(self, quantization: AtLoad, scheme: Scheme) -> None:
        super().__init__(quantization.kernels)
        self.quantization = quantization
        self.scheme = scheme
        self.is_cached = False
        self.scales: Tensor
        """[N, G] float32. Beside the parameter: no tensor of a checkpoint fills it."""

    def __str__(self) -> str:
        return str(self.scheme)

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        super().create(layer, spec)
        if isinstance(spec.tied_to, QuantizingReader):
            self.scales = spec.tied_to.scales
        else:
            layer.register_buffer("weight_scale", self.scales, persistent=False)

    def make_parameters(self, spec: LinearSpec) -> dict[str, nn.Parameter]:
        scheme = self.scheme
        loader = spec.loader(pack=scheme.pack)
        outputs, inputs = spec.shape
        shape = (outputs, inputs // scheme.pack)
        num_groups = 1 if scheme.group is None else _num_groups(spec, scheme.group)
        stored = self.quantization.find(spec, shape, (outputs, num_groups), scheme)
        self.is_cached = stored is not None
        if stored is not None:
            weight, self.scales = stored
            parameter = nn.Parameter(weight, requires_grad=False)
        else:
            parameter = new_parameter(shape, scheme.dtype, loader)
            # Where nothing is loaded (load_format "dummy"), 127 steps are one.
            self.scales = torch.full((outputs, num_groups), 1 / 127)
        filler = QuantizingLoader(loader.shards, loader.dim, spec, self)
        parameter.weight_loader = filler  # type: ignore[attr-defined]
        return {"weight": parameter}

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        return self.scheme.weight(loaded["weight"], self.scales)

    def process(self, layer: nn.Module) -> None:
        self.quantization.keep(self, self.parameters["weight"].data)
        super().process(layer)
        if "weight_scale" in layer._buffers:
            del layer.weight_scale
        # The kernels have their own: those of a file stay in memory as long as they are mapped.
        self.scales = torch.empty(0)


@dataclass(frozen=True)
class QuantizingLoader(ShardLoader):
    """Quantizes a tensor of floats, and takes this rank's share. Scales are those of the whole
    rows, so that all ranks together hold what one would."""

    spec: LinearSpec | None = None
    reader: QuantizingReader | None = None

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        assert self.spec is not None and self.reader is not None
        outputs = self.spec.outputs
        if shard_id is None and len(outputs) > 1:
            sizes = [part.full for part in outputs]
            _check(loaded, (sum(sizes), self.spec.inputs.full))
            for index, piece in enumerate(torch.split(loaded, sizes)):
                self(param, piece, index)
            return
        index = shard_id or 0
        part = outputs[index]
        _check(loaded, (part.full, self.spec.inputs.full))
        own = self.reader.parameters.get("weight")
        if own is None or param is own:
            if not self.reader.is_cached:
                self._fill(param, self.reader.scales, loaded, index)
            return
        # A trial: whether a layer that is tied has the same weight. The scales are compared here.
        scales = torch.zeros_like(self.reader.scales)
        self._fill(param, scales, loaded, index)
        first = sum(other.size for other in outputs[:index])
        rows = slice(first, first + part.size)
        if not torch.equal(scales[rows], self.reader.scales[rows]):
            param.data.view(torch.uint8)[rows].bitwise_not_()

    def _fill(self, param: Tensor, scales: Tensor, loaded: Tensor, index: int) -> None:
        assert self.spec is not None and self.reader is not None
        scheme = self.reader.scheme
        part = self.spec.outputs[index]
        inputs = self.spec.inputs
        first = sum(other.size for other in self.spec.outputs[:index])
        count = max(0, min(part.size, part.full - part.start))
        tile = max(1, _TILE // inputs.full)
        for begin in range(0, count, tile):
            size = min(tile, count - begin)
            rows = loaded.narrow(0, part.start + begin, size)
            codes, found = scheme.quantize(rows.to(param.device, torch.float32))
            if not torch.isfinite(found).all():
                raise CheckpointError("holds values that are not finite")
            cut = codes.narrow(1, inputs.start, inputs.size)
            into = slice(first + begin, first + begin + size)
            param.data[into] = scheme.pack_codes(cut)
            scales[into] = _of_share(found, inputs, scheme.group)
        padding = slice(first + count, first + part.size)
        param.data[padding] = 0
        scales[padding] = 0


def _num_groups(spec: LinearSpec, group: int) -> int:
    """Groups of this rank's inputs. Raises ConfigError where they are cut."""
    ways = (
        f"quantization_override='{spec.prefix}=int8' stores it in int8, "
        f"quantization_skip='{spec.prefix}' as it is."
    )
    if spec.inputs.full % group:
        raise ConfigError(
            f"{spec.prefix} has {spec.inputs.full} inputs, and groups of {group} do not divide "
            f"them: {ways}"
        )
    try:
        return spec.inputs.stored(f"inputs of {spec.prefix}", group=group).size
    except ConfigError as error:
        raise ConfigError(f"{error} {ways}") from None


def _check(loaded: Tensor, shape: tuple[int, int]) -> None:
    if tuple(loaded.shape) != shape:
        raise CheckpointError(f"has shape {list(loaded.shape)}, not {list(shape)}")
    if not loaded.is_floating_point() or loaded.itemsize < 2:
        raise CheckpointError(f"is quantized ({str(loaded.dtype).removeprefix('torch.')})")


def _of_share(scales: Tensor, inputs: Shard, group: int | None) -> Tensor:
    """The scales [N, G] of a rank's inputs."""
    if group is None:
        return scales
    stored = inputs.stored("inputs", group=group)
    return scales.narrow(1, stored.start, stored.size)


class AtLoad(Quantization):
    """Quantizes linear layers, experts, embeddings and heads of a checkpoint of floats."""

    name: ClassVar[str]

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        load = vllm_config.load
        self.group = load.quantization_group_size or Int4Scheme().group
        self.skip = Patterns("quantization_skip", load.quantization_skip)
        self.schemes = _overrides(load.quantization_override)
        self.override = Patterns("quantization_override", list(self.schemes))
        self.readers: list[QuantizingReader] = []
        values = vllm_config.plugins.plugin_option.get("quantize", {})
        options = msgspec.convert(values, Options, strict=False)
        self.cache: Cache | None = open_cache(vllm_config, self.name, options)

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        if vllm_config.hf_config.get("quantization_config"):
            return "its weights are quantized already"
        group = vllm_config.load.quantization_group_size
        if group is not None and group not in GROUP_SIZES:
            sizes = ", ".join(map(str, GROUP_SIZES))
            return f"option 'quantization_group_size' must be one of {sizes}, not {group}"
        if group is not None and "int4" not in (
            cls.name,
            *_overrides(vllm_config.load.quantization_override).values(),
        ):
            return "option 'quantization_group_size' is for int4"
        return None

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        skipped = self.skip.find(spec)
        wanted = self.override.find(spec)
        if spec.tied_to is not None:
            return self._tied(spec, skipped or wanted)
        if skipped is not None:
            if wanted is not None:
                raise ConfigError(
                    f"{spec.prefix}: quantization_skip {skipped!r} and quantization_override "
                    f"{wanted!r} both name it."
                )
            return None
        reader = QuantizingReader(self, self._scheme(spec, wanted))
        self.readers.append(reader)
        return reader

    def _tied(self, spec: LinearSpec, pattern: str | None) -> LinearMethod | None:
        embedding = spec.tied_to
        scheme = embedding.scheme if isinstance(embedding, QuantizingReader) else None
        stored = None if scheme is None else scheme.name
        if pattern is not None and self.schemes.get(pattern) != stored:
            raise UnsupportedError(
                f"{spec.prefix} shares its weight with the embedding, and {pattern!r} does not "
                "name both alike. Name the embedding, too."
            )
        return None if scheme is None else QuantizingReader(self, scheme)

    def _scheme(self, spec: LinearSpec, pattern: str | None) -> Scheme:
        name = self.name
        if pattern is not None:
            name = self.schemes[pattern]
        elif name == "int4" and (spec.kind in _FINE or spec.prefix.rpartition(".")[2] in ROUTERS):
            return Int8Scheme()
        return Int4Scheme(self.group) if name == "int4" else SCHEMES[name]()

    def find(
        self,
        spec: LinearSpec,
        shape: tuple[int, int],
        scales: tuple[int, int],
        scheme: Scheme,
    ) -> tuple[Tensor, Tensor] | None:
        """The layer's stored codes and scales, mapped from the cache. None: it has none."""
        device = torch.get_default_device()
        if self.cache is None or device.type == "meta":
            return None
        found = self.cache.find(
            spec.prefix, {"weight": (scheme.dtype, shape), "scales": (torch.float32, scales)}
        )
        if found is None:
            return None
        return found["weight"].to(device), found["scales"].to(device)

    def keep(self, reader: QuantizingReader, stored: Tensor) -> None:
        """Called with each layer's weight when all are loaded: checks that each pattern has named a
        layer, and writes to the cache."""
        self.check()
        is_own = not isinstance(reader.spec.tied_to, QuantizingReader)
        if self.cache is not None and not self.cache.is_complete and is_own:
            self._write(self.cache, reader, stored)

    def check(self) -> None:
        """Raises ConfigError for a pattern that has named no layer. Of a stage's layers, a pattern
        need name none."""
        if self.vllm_config.parallel.pipeline_parallel_size == 1:
            self.skip.check()
            self.override.check()

    def _write(self, cache: Cache, reader: QuantizingReader, stored: Tensor) -> None:
        """Writes one layer. The first call says what all will hold."""
        if not cache.is_writing:
            layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
            for other in self.readers:
                prefix = other.spec.prefix
                weight = other.parameters["weight"]
                layout[f"{prefix}.scales"] = (torch.float32, tuple(other.scales.shape))
                layout[f"{prefix}.weight"] = (weight.dtype, tuple(weight.shape))
            cache.begin(layout)
        cache.write(f"{reader.spec.prefix}.weight", stored)
        cache.write(f"{reader.spec.prefix}.scales", reader.scales)


def _overrides(items: list[str]) -> dict[str, str]:
    """["PATTERN=int8"] -> {"PATTERN": "int8"}. Raises ConfigError."""
    found: dict[str, str] = {}
    for item in items:
        pattern, has_name, name = item.rpartition("=")
        if not (pattern and has_name) or name not in SCHEMES:
            raise ConfigError(
                f"option 'quantization_override': write PATTERN=NAME with one of "
                f"{', '.join(SCHEMES)}, not {item!r}."
            )
        found[pattern] = name
    return found


class Int8(AtLoad):
    """int8, one scale per output."""

    name = "int8"


class Int4(AtLoad):
    """int4 in groups of inputs. Embeddings, heads and routers are in int8."""

    name = "int4"


class Fp8(AtLoad):
    """float8 e4m3, one scale per output."""

    name = "fp8"
