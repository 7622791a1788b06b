"""What `toolkit explain` tells of compiled parts."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig

from toolkit_lm_compile.options import options_of, sizes_of


def describe_parts(config: VllmConfig) -> list[str]:
    """How a forward pass of the config is computed, without compiling it."""
    options, level = options_of(config), config.compilation.optimization_level
    sizes = sizes_of(options, level)
    code = "code of Inductor's" if options.backend == "inductor" else "their graphs as they were traced (backend: eager)"
    lines = [
        f"parts between {', '.join(options.splitting_ops)} are {code}, for any number of tokens{_listed(sizes)}",
        "kernels compute nothing within them: those ops, encoders beside a decoder, the head and the sampler run as at level 0",
    ]
    if options.compile_sizes and not sizes:
        lines.append(f"compile_sizes count from optimization_level 2, and not at {level}")
    if not config.compilation.compile_cache:
        lines.append("each start compiles anew (--no-compile-cache)")
    return lines


def _listed(sizes: list[int]) -> str:
    return f", and for {', '.join(map(str, sizes))}" if sizes else ""
