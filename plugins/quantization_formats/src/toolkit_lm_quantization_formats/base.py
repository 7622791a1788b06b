"""The base of all formats: which layers are quantized, and how keys and values are kept."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ToolkitError, UnsupportedError
from toolkit_lm.kv import FullSpec, KVCacheSpec
from toolkit_lm.model import LinearMethod, LinearSpec, Quantization
from toolkit_lm_weights.patterns import PatternError, begins
from torch import Tensor

from toolkit_lm_quantization_formats.schemes import Scheme, SchemeReader

_NAME = re.compile(r"[\w.]+")
_KV_SCALES = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")
T = TypeVar("T")


class FormatQuantization(Quantization):
    """Base of formats. One reads its config when it is made, and raises CheckpointError for what
    it does not understand."""

    follows_tensors: ClassVar[bool] = True
    """Whether the checkpoint's tensors say which layers are quantized. Otherwise the config does,
    and tensors that contradict it are an error."""
    kv_dtype: str | None = None
    """Dtype of keys and values that the checkpoint has scales for."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.keeps_scales = vllm_config.cache.kv_cache_dtype in ("auto", "fp8")
        """Whether keys and values are kept as the checkpoint says."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        if not vllm_config.hf_config.get("quantization_config"):
            return "its weights are not quantized, and this format is read from checkpoints"
        try:
            cls(vllm_config)
        except ToolkitError as error:
            return str(error).removesuffix(".")
        return None

    @abstractmethod
    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        """How the config says that the checkpoint stores one of a layer's weights; None: in floats.
        `tensors`: names of its tensors; empty: unknown. Raises UnsupportedError."""

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        if spec.tied_to is not None:
            tied = spec.tied_to
            return SchemeReader(self.kernels, tied.scheme) if type(tied) is SchemeReader else None
        sources = spec.sources or (spec.prefix,)
        known = spec.tensors or (None,) * len(sources)
        schemes = [
            self._scheme(spec, source, there) for source, there in zip(sources, known, strict=True)
        ]
        if any(scheme != schemes[0] for scheme in schemes):
            listed = ", ".join(
                f"{source} as {_name_of(scheme)}"
                for source, scheme in zip(sources, schemes, strict=True)
            )
            raise UnsupportedError(
                f"{spec.prefix} is one layer here, and the checkpoint stores its weights in "
                f"several ways: {listed}. Quantize them alike, or leave all of them as they are."
            )
        return None if schemes[0] is None else SchemeReader(self.kernels, schemes[0])

    def _scheme(
        self, spec: LinearSpec, source: str, tensors: frozenset[str] | None
    ) -> Scheme | None:
        if spec.kind == "embedding" and tensors is None:
            return None
        scheme = self.scheme(spec, source, tensors or frozenset())
        if scheme is None or not tensors or not tensors.isdisjoint(scheme.marks):
            return scheme
        if self.follows_tensors:
            return None
        raise CheckpointError(
            f"{source}: config.json says that it is quantized, and the checkpoint has "
            f"{', '.join(sorted(tensors))}, without {' and '.join(scheme.marks)}. Name it in the "
            "config as a layer that is not quantized."
        )

    def kv_cache(self, spec: KVCacheSpec, prefix: str) -> KVCacheSpec:
        if self.kv_dtype is None or not isinstance(spec, FullSpec):
            return spec
        return msgspec.structs.replace(spec, dtype=self.kv_dtype, scales="layer")

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        if self.kv_dtype is not None:
            return weights
        return (
            (name, tensor) for name, tensor in weights if name.rpartition(".")[2] not in _KV_SCALES
        )

    def fp8_cache(self, field: str, is_read: bool) -> str | None:
        """Dtype of a cache in float8 with a scale for keys and one for values. Raises
        UnsupportedError for another one, unless an option says otherwise."""
        if not self.keeps_scales:
            return None
        if not is_read:
            raise UnsupportedError(
                f"quantization_config of config.json: {field} is no float8 with a scale for keys "
                "and one for values, which is what is read. kv_cache_dtype='model' keeps them in "
                "the model's dtype"
            )
        return "float8_e4m3fn"

    def parse(self, kind: type[T], values: Mapping[str, Any] | None = None) -> T:
        """The config as a struct. Raises CheckpointError, which names the field."""
        try:
            return msgspec.convert(self.config if values is None else values, kind)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"quantization_config of config.json: {error}") from None


def group_of(size: int | None) -> int | None:
    """Inputs of a group; None, which a config states as -1 or not at all: all inputs.

    Raises CheckpointError.
    """
    if size is None or size == -1:
        return None
    if not 1 <= size <= 2**20:
        raise CheckpointError(
            f"quantization_config of config.json: group_size must be -1 or at least 1, not {size}"
        )
    return size


def is_skipped(source: str, names: Iterable[str]) -> bool:
    """Whether a config's list of modules that are not quantized has a module: by its name, the end
    or the beginning of it, or a regular expression. Raises CheckpointError."""
    return any(
        source.endswith(name)
        or f"{source}.".startswith(f"{name}.")
        or (
            not _NAME.fullmatch(name)
            and matched(begins, "the list of modules", rf"(?:{name})(?:\.|$)", source)
        )
        for name in names
    )


def matched(
    how: Callable[[str, str], bool], field: str, pattern: str, source: str, *, prefix: str = ""
) -> bool:
    """Whether a module's name matches a regular expression of the config, in a bounded number of
    steps. `how`: `matches`, `begins` or `finds`. Raises CheckpointError."""
    try:
        return how(pattern, source)
    except PatternError as error:
        raise CheckpointError(
            f"quantization_config of config.json: {field}: {prefix + pattern[:200]!r} is no "
            f"regular expression that can be used: {error}"
        ) from None


def one_of(field: str, value: T, known: Iterable[T]) -> T:
    """The value of a config's field. Raises UnsupportedError for one that is not read."""
    known = list(known)
    if value not in known:
        raise UnsupportedError(
            f"quantization_config of config.json: {field} is {value!r}, and what is read is "
            f"{', '.join(map(repr, known))}"
        )
    return value


def _name_of(scheme: Scheme | None) -> str:
    return "floats" if scheme is None else repr(scheme)
