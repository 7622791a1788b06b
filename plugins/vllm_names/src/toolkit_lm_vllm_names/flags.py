"""vLLM's flags in a command line."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from toolkit_lm_vllm_names.name import Name
from toolkit_lm_vllm_names.table import (
    COMPILATION,
    SHORT_FLAGS,
    TABLE,
    compilation_options,
    tell_of_compilation,
    tell_of_no_effect,
)
from toolkit_lm_vllm_names.values import parsed

_LISTS = (
    "served_model_name",
    "api_key",
    "allowed_media_domains",
    "lora_modules",
    "cudagraph_capture_sizes",
    "logits_processors",
    "numa_bind_nodes",
)
"""Options whose flags take several words."""
_LEVELS = ("-O0", "-O1", "-O2", "-O3")
_ATTACHED = ("-O.", "-cc.")
"""Beginnings of flags that have their value attached."""


class Flag(NamedTuple):
    """One flag of a line, with its value."""

    row: Name
    value: Any
    words: list[str]
    """Words of the flag, in the form they have in the line."""


def read_flag(words: Sequence[str]) -> Flag | None:
    """The flag that a line begins with; None where it begins with another word, or a flag that vLLM
    does not have."""
    if words[0] in _LEVELS:
        return Flag(TABLE["optimization_level"], words[0][2:], [words[0]])
    if words[0].startswith(_ATTACHED):
        # -O.mode=3, -cc.pass_config.fuse_norm=true
        path, _, text = words[0].partition(".")[2].partition("=")
        value = parsed(text)
        for key in reversed(path.split(".")):
            value = {key: value}
        return Flag(TABLE["compilation_config"], value, [words[0]])
    name, has_value, text = words[0].partition("=")
    is_off = name.startswith("--no-")
    row = _row(name.replace("--no-", "--", 1) if is_off else name)
    if row is None:
        return None
    if has_value:
        return Flag(row, _value(row, [text]), [words[0]])
    if is_off or (row.is_switch and not _is_truth(words[1:2])):
        return Flag(row, not is_off, [words[0]])
    values = _values(row, words[1:])
    return Flag(row, _value(row, values), [words[0], *values])


def translate_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words after a command, with flags of ours in place of vLLM's.

    `known` are the command's own flags; one that vLLM has, too, is left as it is unless its values
    are to be translated. Raises ConfigError for what cannot be had.
    """
    made: list[str] = []
    about_compilation: list[tuple[str, Any]] = []
    rest = list(words)
    while rest:
        flag = None if rest[0] == "--" else read_flag(rest)
        if rest[0] == "--":
            break
        is_own = flag is not None and rest[0].partition("=")[0] in known
        if flag is not None and flag.row.name in COMPILATION:
            about_compilation.append((flag.row.name, flag.value))
            del rest[: len(flag.words)]
            continue
        if flag is not None and not is_own:
            tell_of_no_effect(flag.row, flag.value)
        if flag is None or (
            is_own
            and (flag.row.kind != "same" or flag.row.convert is None or flag.row.name in _LISTS)
        ):
            made.append(rest.pop(0))
            continue
        made += flags_of(flag.row.translate(flag.value))
        del rest[: len(flag.words)]
    tell_of_compilation(about_compilation)
    return [*made, *flags_of(compilation_options(about_compilation)), *rest]


def flags_of(options: dict[str, Any]) -> list[str]:
    """Options in our names, as flags."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            for text in _texts(value):
                words += [flag, text]
    return words


def _texts(value: Any) -> list[str]:
    """The values of a flag, which is given once for each of them."""
    if isinstance(value, dict):
        return [
            f"{name}.{key}={_text(value)}"
            for name, fields in value.items()
            for key, value in fields.items()
        ]
    return [str(text) for text in (value if isinstance(value, list | tuple) else [value])]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)


def _row(name: str) -> Name | None:
    if name in SHORT_FLAGS:
        return TABLE[SHORT_FLAGS[name]]
    return TABLE.get(name[2:].replace("-", "_")) if name.startswith("--") else None


def _is_truth(words: Sequence[str]) -> bool:
    return [word.lower() for word in words] in (["true"], ["false"])


def _values(row: Name, words: Sequence[str]) -> list[str]:
    """The words that are a flag's values."""
    if row.name not in _LISTS:
        return list(words[:1])
    end = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return list(words[:end])


def _value(row: Name, values: Sequence[str]) -> Any:
    if len(values) > 1:
        return list(values)
    # A text value is used as written.
    text = values[0] if values else None
    return text if row.kind in ("same", "renamed") and not row.is_switch else parsed(text)
