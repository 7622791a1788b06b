"""The table: what vLLM calls an option of its engine or of its server, and what it is here, or why
it is not.

Aliases, hints in errors, `toolkit migrate-vllm` and the page "Coming from vLLM" are made from it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit_lm_vllm_names import compilation, values
from toolkit_lm_vllm_names.engine_names import ENGINE
from toolkit_lm_vllm_names.name import Name
from toolkit_lm_vllm_names.refused_names import REFUSED
from toolkit_lm_vllm_names.server_names import SERVER

logger = logging.getLogger(__name__)

TABLE: dict[str, Name] = {name.name: name for name in (*ENGINE, *REFUSED, *SERVER)}
"""All names of vLLM, those of its engine first."""

COMPILATION = (
    *("optimization_level", "compilation_config", "enforce_eager"),
    *("cudagraph_capture_sizes", "cuda_graph_sizes", "use_cudagraph"),
)
"""Options that say together how the forward pass is compiled."""

SHORT_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dcp": "decode_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-q": "quantization",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-asc": "api_server_count",
}
"""vLLM's short flags."""


def tell_of_no_effect(row: Name, value: Any) -> None:
    """Logs what of a value changes nothing here."""
    for sentence in row.without_effect(value):
        logger.warning("vLLM's %s.", sentence)


def tell_of_compilation(pairs: Sequence[tuple[str, Any]]) -> None:
    """Logs which parts of several `COMPILATION` options have no effect here."""
    lowers = lowers_level(pairs)
    for name, value in pairs:
        if name != "enforce_eager" or not lowers:
            tell_of_no_effect(TABLE[name], value)


def translate(options: dict[str, Any]) -> dict[str, Any]:
    """Options in our names; those that vLLM does not have are left as they are, and win. Raises
    ConfigError."""
    about_compilation = [(name, value) for name, value in options.items() if name in COMPILATION]
    made: dict[str, Any] = {}
    for name, value in options.items():
        if name in TABLE and name not in COMPILATION:
            tell_of_no_effect(TABLE[name], value)
            made = _merged(made, TABLE[name].translate(value))
    tell_of_compilation(about_compilation)
    made |= compilation_options(about_compilation)
    return _merged(made, {name: value for name, value in options.items() if name not in TABLE})


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine in our names, as `translate` gives them. Experts of an engine with one
    rank are not divided. Raises ConfigError."""
    made = translate(options)
    if made.get("enable_expert_parallel") and made.get("tensor_parallel_size") in (None, 1):
        logger.warning(
            "vLLM's 'enable_expert_parallel' has no effect here without tensor_parallel_size of 2 "
            "or more: each engine has all experts."
        )
        del made["enable_expert_parallel"]
    return made


def _merged(made: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Both; `others` win. Plugins' options are merged, also with those that are written as
    texts."""
    both = made | others
    stated = [found["plugin_option"] for found in (made, others) if found.get("plugin_option")]
    if len(stated) == 2:
        mappings = [option for option in stated if isinstance(option, Mapping)]
        both["plugin_option"] = (
            compilation.merged(*mappings)
            if len(mappings) == 2
            else [text for option in stated for text in _texts(option)]
        )
    return both


def _texts(options: Any) -> list[str]:
    """Plugins' options as texts, NAME.KEY=VALUE."""
    if isinstance(options, Mapping):
        return [f"{name}.{key}={value}" for name in options for key, value in options[name].items()]
    return [options] if isinstance(options, str) else list(options)


def compilation_options(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Combines several `COMPILATION` options. A given level wins over a mode, and enforce_eager
    over both."""
    made = _asked_of_compilation(pairs)
    if lowers_level(pairs):
        made["optimization_level"] = 0
    return made


def lowers_level(pairs: Sequence[tuple[str, Any]]) -> bool:
    """Whether enforce_eager is among options of `COMPILATION` of which others ask for code to be
    compiled."""
    is_eager = any(
        name == "enforce_eager" and not values.asks_nothing(value) for name, value in pairs
    )
    return is_eager and not values.asks_nothing(
        _asked_of_compilation(pairs).get("optimization_level")
    )


def _asked_of_compilation(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Combines all options except enforce_eager. Their keys are read as keys of one
    compilation_config."""
    keys: dict[str, Any] = {}
    level: dict[str, Any] = {}
    for name, value in pairs:
        if value is None or name == "enforce_eager":
            continue
        if name == "optimization_level":
            level = TABLE[name].translate(value)
        elif name == "compilation_config":
            keys = compilation.merged(keys, compilation.mapping(value))
        elif name == "use_cudagraph":
            keys[name] = value
        else:
            keys |= json.loads(TABLE[name].translate(value).get("compilation_config", "{}"))
    return TABLE["compilation_config"].translate(keys) | level


def names(rows: Iterable[Name], *, of_server: bool) -> list[Name]:
    """Options of the server, or of the engine."""
    return [row for row in rows if row.of_server == of_server]
