"""Description of the compiled parts for `toolkit explain`."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig

from toolkit_lm_compile.options import bands_of, options_of


def describe_parts(config: VllmConfig) -> list[str]:
    """How a forward pass of the config is computed, without compiling it."""
    options = options_of(config)
    level = config.compilation.optimization_level
    bands = bands_of(options, level)
    code = (
        "code of Inductor's"
        if options.backend == "inductor"
        else "their graphs as they were traced (backend: eager)"
    )
    lines = [
        (
            f"parts between {', '.join(options.splitting_ops)} are {code}, for any number of "
            f"tokens{_listed([str(band) for band in bands])}"
        ),
        (
            "kernels compute nothing within them: those ops, encoders beside a decoder, the head "
            "and the sampler run as at level 0"
        ),
    ]
    if (options.compile_sizes or options.compile_ranges) and not bands:
        lines.append(
            f"compile_sizes and compile_ranges count from optimization_level 2, and not at {level}"
        )
    if not config.compilation.compile_cache:
        lines.append("each start compiles anew (--no-compile-cache)")
    return lines


def _listed(bands: list[str]) -> str:
    return f", and for {', '.join(bands)}" if bands else ""
