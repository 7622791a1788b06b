"""ModelOpt: NVIDIA's checkpoints in FP8 and NVFP4."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from msgspec import Struct, field
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import LinearSpec

from toolkit_lm_quantization_formats.base import FormatQuantization, one_of
from toolkit_lm_quantization_formats.schemes import Nibbles, Plain, Scheme

_NVFP4 = Nibbles(
    group=16, codes="weight", whole_scale="weight_scale_2", marks=("weight_scale", "weight_scale_2")
)
_SCHEMES: dict[str, Scheme] = {
    "FP8": Plain(),
    "FP8_PER_CHANNEL_PER_TOKEN": Plain(rows=1),
    "FP8_PB_WO": Plain(rows=128, group=128),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "MXFP8": Plain(rows=1, group=32, exponents=True),
}
ALGORITHMS = frozenset(_SCHEMES)
"""Algorithms of one layer. Configs may have them in small letters."""
_MIXED = "MIXED_PRECISION"


class Layer(Struct):
    quant_algo: str | None = None


class Config(Struct):
    quant_algo: str
    kv_cache_quant_algo: str | None = None
    kv_cache_scheme: dict[str, object] | None = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None
    quantized_layers: dict[str, Layer] = field(default_factory=dict)


class ModelOpt(FormatQuantization):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        # hf_quant_config.json has it one level deeper than config.json.
        nested = self.config.get("quantization")
        self.parsed = config = self.parse(Config, nested if isinstance(nested, dict) else None)
        self.algorithm = _algorithm("quant_algo", config.quant_algo, [*_SCHEMES, _MIXED])
        self.layers = {
            name: layer.quant_algo
            and _algorithm(f"quantized_layers: {name}: quant_algo", layer.quant_algo, _SCHEMES)
            for name, layer in config.quantized_layers.items()
        }
        cache = config.kv_cache_quant_algo
        if cache is None and config.kv_cache_scheme is not None:
            stated = config.kv_cache_scheme
            cache = "FP8" if (stated.get("num_bits"), stated.get("type")) == (8, "float") else "?"
        if cache is not None:
            self.kv_dtype = self.fp8_cache("kv_cache_quant_algo", cache == "FP8")

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        config = self.parsed
        if self.algorithm == _MIXED:
            for name, algorithm in self.layers.items():
                if _matches(name, source):
                    return _SCHEMES.get(algorithm or "")
            return None
        excluded = config.exclude_modules or config.ignore or []
        if not tensors and (
            spec.kind == "embedding" or any(_matches(name, source) for name in excluded)
        ):
            return None
        return _SCHEMES[self.algorithm]


def _algorithm(field: str, stated: str, known: Iterable[str]) -> str:
    known = list(known)
    return one_of(field, stated.upper() if stated.upper() in known else stated, known)


def _matches(name: str, source: str) -> bool:
    return fnmatchcase(source, name) or source.startswith(f"{name}.")
