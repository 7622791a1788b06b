"""Facts that checkpoints state twice: one table of the places of each, and of the one that wins.

transformers settles most contradictions silently. Here they are logged, and those that transformers
does not settle are refused.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from toolkit_lm.errors import CheckpointError

logger = logging.getLogger(__name__)
_TYPES = {"su": "longrope", "mrope": "default"}
"""Further names of types of rotary scaling."""
_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Two names of one size."""
_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files with a checkpoint's quantization, and the method of one that names none."""


class Contradiction(NamedTuple):
    """Two statements that differ."""

    first: str
    second: str
    """The second statement, with its place, as `first` has."""
    result: str
    """The outcome of the contradiction."""


class Rule(NamedTuple):
    """A row of the table."""

    subject: str
    places: str
    wins: str
    """Rule for the place that wins, in Markdown, as the page on models shows it."""
    settle: Callable[[dict[str, Any]], Contradiction | None] | None
    """Makes config.json, or its `text_config`, state it once. None: it is settled elsewhere."""


def settled(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of config.json without contradictions. Each contradiction is logged.

    Raises CheckpointError for one that cannot be settled.
    """
    found = dict(hf_config)
    parts = [found]
    if isinstance(found.get("text_config"), dict):
        parts.append(found.setdefault("text_config", {}))
        parts[1] = found["text_config"] = dict(parts[1])
    for rule in TWICE:
        for part in parts:
            if rule.settle is not None and (settled := rule.settle(part)) is not None:
                logger.warning(
                    "config.json says %s, and %s: %s.",
                    settled.first,
                    settled.second,
                    settled.result,
                )
    return found


def with_quantization(
    folder: Path, hf_config: dict[str, Any], read: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Returns config.json with the `quantization_config` that it may leave to its older name, to
    its `text_config`, or to a file next to it. Logs such a file that names another quantization."""
    text = hf_config.get("text_config")
    stated = (
        hf_config.get("quantization_config")
        or hf_config.get("compression_config")
        or (text.get("quantization_config") if isinstance(text, dict) else None)
    )
    for name, method in _QUANTIZATION_FILES.items():
        if not (folder / name).is_file():
            continue
        other = read(folder / name)
        other = {**other, "quant_method": _method(other) or method}
        if not stated:
            stated = other
        elif _method(stated) != other["quant_method"]:
            logger.warning(
                "%s names the quantization %r, and config.json %r, which counts.",
                folder / name,
                other["quant_method"],
                _method(stated),
            )
    return {**hf_config, "quantization_config": stated} if stated else hf_config


def check_end_tokens(hf_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
    """Logs an end-of-text token of config.json that generation_config.json leaves out."""
    text = hf_config.get("text_config")
    stated = _tokens(
        (text.get("eos_token_id") if isinstance(text, dict) else None)
        or hf_config.get("eos_token_id")
    )
    generation = _tokens(generation_config.get("eos_token_id"))
    if generation and (more := sorted(stated - generation)):
        logger.warning(
            "config.json says eos_token_id %s, and generation_config.json %s: all of them end a "
            "text.",
            more,
            sorted(generation),
        )


def _tokens(value: Any) -> set[int]:
    return {
        token for token in (value if isinstance(value, list) else [value]) if type(token) is int
    }


def _method(stated: Any) -> str:
    if not isinstance(stated, dict):
        return ""
    nested = stated.get("quantization")
    algorithm = nested.get("quant_algo") if isinstance(nested, dict) else None
    return str(stated.get("quant_method") or ("modelopt" if algorithm else "")).lower()


def _rope(values: dict[str, Any]) -> Contradiction | None:
    older = values.get("rope_scaling")
    newer = values.get("rope_parameters")
    if not (isinstance(older, dict) and older and isinstance(newer, dict) and newer):
        return None
    if kinds := [mapping for mapping in newer.values() if isinstance(mapping, dict)]:
        # The model's class knows which kinds of layers the older one applies to.
        stated = _full(older, {}).items()
        if any(stated <= _full(mapping, {}).items() for mapping in kinds):
            return None
        newer_text = f"rope_parameters {reprlib.repr(newer)}"
        return Contradiction(
            f"rope_scaling {reprlib.repr(older)}",
            newer_text,
            "the former counts for the layers that the model scales",
        )
    values["rope_parameters"] = older
    del values["rope_scaling"]
    if _full(older, values) == _full(newer, values):
        return None
    return Contradiction(
        f"rope_scaling {reprlib.repr(older)}",
        f"rope_parameters {reprlib.repr(newer)}",
        "the former counts",
    )


def _full(rope: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Adds what is stated next to it, and gives each type one name."""
    siblings = {
        key: values[key]
        for key in ("rope_theta", "partial_rotary_factor")
        if values.get(key) is not None
    }
    stated = {
        key: value
        for key, value in rope.items()
        if value is not None and key not in ("type", "rope_type")
    }
    return {**siblings, **stated, "rope_type": _type(rope.get("rope_type") or rope.get("type"))}


def _type(name: Any) -> str:
    return _TYPES.get(str(name or "default"), str(name or "default"))


def _rope_type(values: dict[str, Any]) -> Contradiction | None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        if (
            isinstance(rope, dict)
            and rope.get("type")
            and rope.get("rope_type")
            and _type(rope["type"]) != _type(rope["rope_type"])
        ):
            values[key] = {name: value for name, value in rope.items() if name != "type"}
            return Contradiction(
                f"type {rope['type']!r}",
                f"rope_type {rope['rope_type']!r} in {key}",
                "the latter counts",
            )
    return None


def _beside_rope(values: dict[str, Any]) -> Contradiction | None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = values.get(key)
        for name in ("rope_theta", "partial_rotary_factor"):
            if (
                isinstance(rope, dict)
                and None not in (own := rope.get(name), sibling := values.get(name))
                and own != sibling
            ):
                values[name] = own
                return Contradiction(
                    f"{name} {sibling!r}", f"{own!r} in {key}", "the latter counts"
                )
    return None


def _dtype(values: dict[str, Any]) -> Contradiction | None:
    older, newer = (
        str(values.get(key) or "").removeprefix("torch.") for key in ("torch_dtype", "dtype")
    )
    if not (older and newer) or older == newer:
        return None
    del values["torch_dtype"]
    return Contradiction(f"torch_dtype {older!r}", f"dtype {newer!r}", "the latter counts")


def _dtype_of_text(values: dict[str, Any]) -> Contradiction | None:
    text = values.get("text_config")
    if not isinstance(text, dict):
        return None
    whole, part = (
        str(source.get("dtype") or source.get("torch_dtype") or "").removeprefix("torch.")
        for source in (values, text)
    )
    if not (whole and part) or whole == part:
        return None
    values["text_config"] = {
        key: value for key, value in text.items() if key not in ("dtype", "torch_dtype")
    }
    return Contradiction(f"dtype {whole!r}", f"{part!r} in text_config", "the former counts")


def _quantization(values: dict[str, Any]) -> Contradiction | None:
    text = values.get("text_config")
    whole = values.get("quantization_config")
    part = text.get("quantization_config") if isinstance(text, dict) else None
    if whole and part and whole != part:
        raise CheckpointError(
            "config.json says two different things in quantization_config and in that of "
            "text_config: leave one of them."
        )
    return None


def _sizes(values: dict[str, Any]) -> Contradiction | None:
    for name, other in _SIZES.items():
        if None not in (first := values.get(name), second := values.get(other)) and first != second:
            raise CheckpointError(
                f"config.json says {name} {first!r}, and {other} {second!r}, which is the same: "
                "leave one of them."
            )
    return None


TWICE = (
    Rule(
        "whether the head is the embedding",
        "`tie_word_embeddings` and the file's own `lm_head.weight`",
        "the weights: a head that differs is kept, and logged",
        None,
    ),
    Rule(
        "whether the head is the embedding",
        "`tie_word_embeddings` of config.json and of its `text_config`",
        "the weights: it is tied where the file has no head",
        None,
    ),
    Rule(
        "the model's class",
        "`architectures` and `model_type`",
        "`model_type`, where a class is registered for it; logged",
        None,
    ),
    Rule(
        "rotary angles",
        "`rope_scaling` and `rope_parameters`",
        "`rope_scaling`, logged; of the kinds of layers that the model scales",
        _rope,
    ),
    Rule("rotary angles", "`type` and `rope_type`", "`rope_type`, logged", _rope_type),
    Rule(
        "rotary angles",
        "`rope_theta` or `partial_rotary_factor` next to `rope_parameters`, and in it",
        "the value in it, logged",
        _beside_rope,
    ),
    Rule("the dtype", "`torch_dtype` and `dtype`", "`dtype`, logged", _dtype),
    Rule(
        "the dtype",
        "`dtype` of config.json and of its `text_config`",
        "config.json's own, logged",
        _dtype_of_text,
    ),
    Rule(
        "the quantization",
        "`quantization_config` of config.json and of its `text_config`",
        "none: refused",
        _quantization,
    ),
    Rule(
        "the quantization",
        "config.json and a file such as hf_quant_config.json",
        "config.json, logged; the file, if config.json has no `quantization_config`",
        None,
    ),
    Rule(
        "a size",
        "`hidden_size` and `n_embd`, and three other pairs of names",
        "none: refused",
        _sizes,
    ),
    Rule(
        "the end of a text",
        "`eos_token_id` of config.json and of generation_config.json",
        "all of them end it, logged",
        None,
    ),
    Rule(
        "the end of a text",
        "`eos_token` of the tokenizer and `eos_token_id` of these files",
        "all of them end it, logged",
        None,
    ),
    Rule(
        "any of these",
        "config.json and `hf_overrides`",
        "there is no such option: it is refused, and config.json is to be changed",
        None,
    ),
)
"""Every fact that a checkpoint can state in two places. The page on models is generated from it."""
