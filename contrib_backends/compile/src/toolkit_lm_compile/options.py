"""What the option compilation_config asks of compiled parts."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from toolkit_lm.config import CompilationOptions, VllmConfig


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


def options_of(vllm_config: VllmConfig) -> CompilationOptions:
    """What the config's JSON states."""
    return vllm_config.compilation.details


def effective(options: CompilationOptions, level: int) -> dict[str, Any]:
    """What of it has an effect on compiled code."""
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
    """The numbers of tokens, and the bands of them, that get code of their own at a level,
    ascending. A step takes the first that fits."""
    if level < 2:
        return []
    sizes = {Band(size, size) for size in options.compile_sizes}
    return [*sorted(sizes), *sorted({Band(*one) for one in options.compile_ranges} - sizes)]
