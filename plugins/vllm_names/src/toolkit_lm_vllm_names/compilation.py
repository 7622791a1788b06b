"""The keys of vLLM's compilation_config, and its options that ask for graphs or for none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit_lm_vllm_names.values import asks_nothing, parsed

_MODES = {"none": 0, "stock_torch_compile": 1, "dynamo_trace_once": 2, "vllm_compile": 3}
_LEVELS = {0: 0, 1: 1, 2: 1, 3: 2}
"""The optimization_level that compiles as much, by vLLM's mode. vLLM's modes do not tune code,
which our level 3 does."""
SAME = (
    *("backend", "splitting_ops", "compile_sizes", "inductor_compile_config", "cache_dir"),
    *("cudagraph_mode", "cudagraph_capture_sizes", "compile_ranges", "cudagraph_query_len"),
)
"""Keys that mean the same here; the last two are ours alone."""
_LEVEL_KEYS = ("level", "mode")
_OLDER_KEYS = ("use_inductor", "use_cudagraph", "full_cuda_graph")
"""Older keys. If two keys say the same thing, the later in this list wins, whatever their order in
the input."""
NO_EFFECT = {
    "custom_ops": "the option kernels says what computes norms and activations",
    "pass_config": "the kernels fuse what they have one call for",
    "compile_mm_encoder": "encoders of media are not compiled",
    "dynamic_shapes_config": "parts are compiled for any number of tokens",
    "use_inductor_graph_partition": "parts lie between the splitting_ops",
    "use_aot_compile": "all code is compiled before the first request",
    "compile_cache_save_format": "the cache has one format",
    "local_cache_dir": "the folder of the cache is cache_dir",
    "fast_moe_cold_start": "experts are computed alike in all steps",
    "cudagraph_num_of_warmups": "each graph is warmed up as often as it needs",
    "cudagraph_copy_inputs": "inputs have fixed addresses",
    "cudagraph_specialize_lora": "no adapters are loaded",
    "cudagraph_mm_encoder": "encoders of media are not captured",
    "bs_to_padded_graph_size": "it follows from cudagraph_capture_sizes",
}
"""Keys whose values change no result and have no part here, and why."""
REFUSED = {
    "max_cudagraph_capture_size": "list the sizes: cudagraph_capture_sizes",
    "max_capture_size": "list the sizes: cudagraph_capture_sizes",
    "compile_ranges_endpoints": "state the bands: compile_ranges, [[first, last], ...]",
    "compile_ranges_split_points": "state the bands: compile_ranges, [[first, last], ...]",
    "debug_dump_path": "nothing is dumped. `toolkit cache show` tells what is compiled",
    "inductor_passes": "passes of Inductor's come by inductor_compile_config",
    "additional_passes": "passes of Inductor's come by inductor_compile_config",
}


def compilation_config(value: Any) -> dict[str, Any]:
    """A mode alone, or a mapping. A mode is an optimization level. Keys of today count before older
    ones."""
    stated = {key: item for key, item in mapping(value).items() if item is not None}
    kept = {key: stated[key] for key in SAME if key in stated}
    if not kept.get("backend", "inductor"):
        del kept["backend"]
    if "cudagraph_mode" in kept:
        kept["cudagraph_mode"] = str(
            getattr(kept["cudagraph_mode"], "name", kept["cudagraph_mode"])
        ).lower()
    known = (*SAME, *_LEVEL_KEYS, *_OLDER_KEYS, *NO_EFFECT, *REFUSED)
    for key in stated:
        if key not in known:
            raise ValueError(f"it has no key {key!r}. Known: {', '.join(known)}.")
        if key in REFUSED and not asks_nothing(stated[key]):
            raise ValueError(f"{key!r}: {REFUSED[key]}.")
    made: dict[str, Any] = {}
    for key in _LEVEL_KEYS:
        if key in stated:
            made["optimization_level"] = _level(stated[key])
    older: dict[str, Any] = {}
    for key in _OLDER_KEYS:
        if key in stated:
            older |= _mapped(key, stated[key])
    kept = {**older, **kept}
    return {**made, "compilation_config": json.dumps(kept)} if kept else made


def mapping(value: Any) -> Mapping[str, Any]:
    """A value as a mapping: a mode alone is one of its keys."""
    value = parsed(value)
    return value if isinstance(value, Mapping) else {"mode": value}


def without_effect(value: Any) -> list[str]:
    """The keys of a value that change nothing, with the reasons."""
    value = parsed(value)
    mapping = value if isinstance(value, Mapping) else {}
    ignored = [key for key in mapping if key in NO_EFFECT and not asks_nothing(mapping[key])]
    return [f"compilation_config: {key} has no effect: {NO_EFFECT[key]}" for key in ignored]


def _mapped(key: str, value: Any) -> dict[str, Any]:
    """Translates an older key to today's keys."""
    is_on = not asks_nothing(value)
    if key == "use_inductor":
        return {} if is_on else {"backend": "eager"}
    if key == "full_cuda_graph":
        return {"cudagraph_mode": "full"} if is_on else {}
    return {"cudagraph_mode": "piecewise" if is_on else "none"}


def _level(mode: Any) -> int:
    """The level of a number, a name, or a member of vLLM's enumeration."""
    name = str(getattr(mode, "name", mode)).rpartition(".")[2].lower()
    number = _MODES.get(name, int(name) if name.isdecimal() else -1)
    if number not in _LEVELS:
        raise ValueError(
            f"a mode is one of {', '.join(map(str, _LEVELS))} or {', '.join(_MODES).upper()}."
        )
    return _LEVELS[number]


def capture_sizes(value: Any) -> dict[str, Any]:
    """Sizes, as a list, in JSON or one by one."""
    found = parsed(value)
    sizes = found if isinstance(found, list | tuple) else [found]
    return (
        {
            "compilation_config": json.dumps(
                {"cudagraph_capture_sizes": [int(size) for size in sizes]}
            )
        }
        if sizes
        else {}
    )


def use_cudagraph(value: Any) -> dict[str, Any]:
    """The switch of early versions."""
    return {"compilation_config": json.dumps(_mapped("use_cudagraph", value))}


def merged(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two mappings, to any depth. If both have a key, the latter's value wins."""
    both = {**first, **other}
    for key in first.keys() & other.keys():
        if isinstance(first[key], Mapping) and isinstance(other[key], Mapping):
            both[key] = merged(first[key], other[key])
    return both
