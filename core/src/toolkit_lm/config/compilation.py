"""CompilationConfig: whether and how the forward pass is compiled."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from toolkit_lm.config.options import option
from toolkit_lm.errors import ConfigError, in_plain_words

MOST_SIZES = 64
MOST_RANGES = 16
OPAQUE_OPS = (
    "toolkit_lm::attention",
    "toolkit_lm::cache_layer",
    "toolkit_lm::experts",
    "toolkit_lm::linear",
    "toolkit_lm::tap",
)
"""Ops that name their layer. Inside a compiled part, the name would make equal parts different."""
_Number = Annotated[int, Meta(ge=1)]


class CompilationOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The values of `--compilation-config`."""

    backend: Literal["inductor", "eager"] = "inductor"
    """How a part runs: as compiled code, or as the traced graph."""
    splitting_ops: tuple[str, ...] = OPAQUE_OPS
    """Ops between which the graph is split. They run uncompiled."""
    compile_sizes: Annotated[tuple[_Number, ...], Meta(max_length=MOST_SIZES)] = ()
    """Numbers of tokens with code of their own, from level 2."""
    compile_ranges: Annotated[
        tuple[tuple[_Number, _Number], ...], Meta(max_length=MOST_RANGES)
    ] = ()
    """Ranges of numbers of tokens with code of their own, each from its first number to its last,
    from level 2."""
    inductor_compile_config: dict[str, bool | int | float | str | None] = field(
        default_factory=dict
    )
    """Options of torch._inductor.config, by name."""
    cudagraph_mode: Literal[
        "none", "piecewise", "full", "full_decode_only", "full_and_piecewise"
    ] = "none"
    """Parts of a step that CUDA graphs replay: those between attention, whole passes, or both."""
    cudagraph_capture_sizes: Annotated[tuple[_Number, ...], Meta(max_length=MOST_SIZES)] | None = (
        None
    )
    """Numbers of tokens that get a CUDA graph. Other steps are padded to the next. None: several up
    to 512."""
    cudagraph_query_len: Annotated[int, Meta(ge=1, le=64)] = 1
    """Tokens of each row in decode steps with drafts: 1 and the drafts. These steps get whole
    graphs of their own if attention supports it."""
    cache_dir: str | None = None
    """Folder of the compile cache, in place of the user's."""


class CompilationConfig(Struct, frozen=True, kw_only=True):
    """Whether and how the forward pass is compiled, before the first request."""

    optimization_level: Annotated[
        int,
        option(
            "Compilation of the forward pass. 0: none. 1: for any number of tokens. 2: also for "
            "each of compile_sizes. 3: with tuning of these.",
            ge=0,
            le=3,
        ),
    ] = 0
    compilation_config: Annotated[
        str,
        option(
            "Details of compilation, as JSON or a mapping: '{\"compile_sizes\": [1, 8]}'.",
            is_json=True,
        ),
    ] = "{}"
    compile_cache: Annotated[bool, option("Cache compiled code for the next start.")] = True

    def __post_init__(self) -> None:
        end = 0
        for first, last in sorted(self.details.compile_ranges):
            if not end < first <= last:
                raise ConfigError(
                    f"compilation_config: compile_ranges: [{first}, {last}] ends before "
                    "it begins, or meets another."
                )
            end = last

    @property
    def details(self) -> CompilationOptions:
        """Parses `compilation_config`. Raises ConfigError for invalid JSON, an unknown key or a
        wrong value."""
        text = self.compilation_config
        try:
            return msgspec.json.decode(text, type=CompilationOptions)
        except msgspec.MsgspecError as error:
            known = ", ".join(CompilationOptions.__struct_fields__)
            wrong = in_plain_words(error, "compilation_config", text)
            raise ConfigError(f"{wrong} Keys: {known}.") from None
