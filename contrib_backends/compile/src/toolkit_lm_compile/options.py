"""The option compilation_config: its JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct, field
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError

MOST_SIZES = 64
MOST_RANGES = 16
_Number = Annotated[int, Meta(ge=1)]
OPAQUE_OPS = ("toolkit_lm::attention", "toolkit_lm::experts")
"""Ops that name their layer. Inside a part, a name would make equal parts different."""


class Band(NamedTuple):
    """Numbers of tokens, both included; one number where they are equal."""

    first: int
    last: int

    @classmethod
    def of(cls, name: str) -> Band:
        """Of the name of its folder."""
        first, _, last = name.partition("-")
        return cls(int(first), int(last or first))

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class CompilationOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `--compilation-config` may state."""

    backend: Literal["inductor", "eager"] = "inductor"
    """What computes a part: compiled code, or its graph as it was traced."""
    splitting_ops: tuple[str, ...] = OPAQUE_OPS
    """Ops between which the graph is split. They run as they are."""
    compile_sizes: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=MOST_SIZES)] = ()
    """Numbers of tokens that get code of their own, from level 2."""
    compile_ranges: Annotated[tuple[tuple[_Number, _Number], ...], Meta(max_length=MOST_RANGES)] = ()
    """Bands of them that do, each from its first number to its last, from level 2."""
    inductor_compile_config: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    """Options of torch._inductor.config, by name."""
    cudagraph_mode: Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"] = "none"
    """What is replayed as a CUDA graph: parts between attention, whole passes, or both."""
    cudagraph_capture_sizes: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(max_length=MOST_SIZES)] | None = None
    """Numbers of tokens that get a graph. Other steps are padded to the next. None: some up to 512."""
    cudagraph_query_len: Annotated[int, Meta(ge=1, le=64)] = 1
    """Tokens of each row in decode steps with drafts, which get whole graphs of their own where attention can: 1 and the drafts."""
    cache_dir: str | None = None
    """The folder of the cache, in place of the user's."""


def options_of(vllm_config: VllmConfig) -> CompilationOptions:
    """What the config's JSON states. Raises ConfigError for JSON that is none, an unknown key or a wrong value."""
    text = vllm_config.compilation.compilation_config
    try:
        options = msgspec.json.decode(text, type=CompilationOptions)
    except msgspec.MsgspecError as error:
        known = ", ".join(CompilationOptions.__struct_fields__)
        raise ConfigError(f"option 'compilation_config': {text!r}: {error}. Keys: {known}.") from None
    end = 0
    for first, last in sorted(options.compile_ranges):
        if not end < first <= last:
            raise ConfigError(f"option 'compilation_config': compile_ranges: [{first}, {last}] ends before it begins, or meets another.")
        end = last
    return options


def effective(options: CompilationOptions, level: int) -> dict[str, Any]:
    """What of it has an effect on compiled code."""
    stated = msgspec.to_builtins(options)
    for name in ("cache_dir", "cudagraph_mode", "cudagraph_capture_sizes", "cudagraph_query_len"):
        del stated[name]
    return {**stated, "optimization_level": level, "compile_sizes": [str(band) for band in bands_of(options, level)], "compile_ranges": []}


def bands_of(options: CompilationOptions, level: int) -> list[Band]:
    """The numbers of tokens, and the bands of them, that get code of their own at a level, ascending. A step takes the first that fits."""
    if level < 2:
        return []
    sizes = {Band(size, size) for size in options.compile_sizes}
    return [*sorted(sizes), *sorted({Band(*one) for one in options.compile_ranges} - sizes)]
