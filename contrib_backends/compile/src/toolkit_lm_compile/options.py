"""Options of compiled parts in compilation_config."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from toolkit_lm.config import CompilationOptions, VllmConfig


class Band(NamedTuple):
    """A range of numbers of tokens, both ends included. Its name is one number if they are
    equal."""

    first: int
    last: int

    @classmethod
    def of(cls, name: str) -> Band:
        """Parses the name of a band, such as "8" or "1-16"."""
        first, _, last = name.partition("-")
        return cls(int(first), int(last or first))

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def options_of(vllm_config: VllmConfig) -> CompilationOptions:
    """The parsed compilation_config of a config."""
    return vllm_config.compilation.details


def effective(options: CompilationOptions, level: int) -> dict[str, Any]:
    """Options that affect compiled code, for the cache key."""
    stated = msgspec.to_builtins(options)
    for name in ("cache_dir", "cudagraph_mode", "cudagraph_capture_sizes", "cudagraph_query_len"):
        del stated[name]
    return {
        **stated,
        "optimization_level": level,
        "compile_sizes": [str(band) for band in bands_of(options, level)],
        "compile_ranges": [],
    }


def bands_of(options: CompilationOptions, level: int) -> list[Band]:
    """Bands that get their own code at an optimization level, in ascending order, single sizes
    first.

    A step uses the first band that holds its number of tokens.
    """
    if level < 2:
        return []
    sizes = {Band(size, size) for size in options.compile_sizes}
    return [*sorted(sizes), *sorted({Band(*bounds) for bounds in options.compile_ranges} - sizes)]
