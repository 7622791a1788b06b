"""What checkpoints say twice: one table of what is said in several places, and which of them wins.

transformers settles most contradictions without a word. Here they are told; those that transformers
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
"""Of rotary scaling: further names of the same."""
_SIZES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""Two names of one size."""
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")


class Contradiction(NamedTuple):
    """Two statements that differ."""

    first: str
    second: str
    """Each with its place."""
    result: str
    """What comes of it."""


class Rule(NamedTuple):
    """A row of the table."""

    what: str
    places: str
    wins: str
    """In words of Markdown, as the page on models shows them."""
    settle: Callable[[dict[str, Any]], Contradiction | None] | None
    """Makes config.json, or its `text_config`, say it once. None: it is settled elsewhere."""


def settled(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of config.json in which nothing is contradicted. Each contradiction is told.

    Raises CheckpointError for one that nobody settles.
    """
    found = dict(hf_config)
    parts = [found]
    if isinstance(found.get("text_config"), dict):
        parts.append(found.setdefault("text_config", {}))
        parts[1] = found["text_config"] = dict(parts[1])
    for rule in TWICE:
        for part in parts:
            if rule.settle is not None and (one := rule.settle(part)) is not None:
                logger.warning(
                    "config.json says %s, and %s: %s.", one.first, one.second, one.result
                )
    return found


def check_files(
    folder: Path, hf_config: Mapping[str, Any], read: Callable[[Path], dict[str, Any]]
) -> None:
    """Tells of files beside config.json that name another quantization."""
    stated = _method(hf_config.get("quantization_config"))
    for name in _QUANTIZATION_FILES:
        if (
            (folder / name).is_file()
            and (other := _method(read(folder / name)))
            and stated != other
        ):
            logger.warning(
                "%s names the quantization %r, and config.json %r, which counts.",
                folder / name,
                other,
                stated or "none",
            )


def check_end_tokens(hf_config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
    """Tells where config.json names a token of a text's end that generation_config.json leaves
    out."""
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
    if kinds := [one for one in newer.values() if isinstance(one, dict)]:
        # Which kinds of layers the older one is of, the model's class knows.
        stated = _full(older, {}).items()
        if any(stated <= _full(one, {}).items() for one in kinds):
            return None
        said = f"rope_parameters {reprlib.repr(newer)}"
        return Contradiction(
            f"rope_scaling {reprlib.repr(older)}",
            said,
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
    """With what is stated beside it, and one name of each type."""
    beside = {
        key: values[key]
        for key in ("rope_theta", "partial_rotary_factor")
        if values.get(key) is not None
    }
    stated = {
        key: value
        for key, value in rope.items()
        if value is not None and key not in ("type", "rope_type")
    }
    return {**beside, **stated, "rope_type": _type(rope.get("rope_type") or rope.get("type"))}


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
                and None not in (own := rope.get(name), beside := values.get(name))
                and own != beside
            ):
                values[name] = own
                return Contradiction(f"{name} {beside!r}", f"{own!r} in {key}", "the latter counts")
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
        str(one.get("dtype") or one.get("torch_dtype") or "").removeprefix("torch.")
        for one in (values, text)
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
    for one, other in _SIZES.items():
        if None not in (first := values.get(one), second := values.get(other)) and first != second:
            raise CheckpointError(
                f"config.json says {one} {first!r}, and {other} {second!r}, which is the same: "
                "leave one of them."
            )
    return None


TWICE = (
    Rule(
        "whether the head is the embedding",
        "`tie_word_embeddings` and the file's own `lm_head.weight`",
        "the weights: a head that differs is kept, and told",
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
        "`model_type`, where a class is registered for it; told",
        None,
    ),
    Rule(
        "rotary angles",
        "`rope_scaling` and `rope_parameters`",
        "`rope_scaling`, told; of the kinds of layers that the model scales",
        _rope,
    ),
    Rule("rotary angles", "`type` and `rope_type`", "`rope_type`, told", _rope_type),
    Rule(
        "rotary angles",
        "`rope_theta` or `partial_rotary_factor` beside `rope_parameters`, and in it",
        "what is in it, told",
        _beside_rope,
    ),
    Rule("the dtype", "`torch_dtype` and `dtype`", "`dtype`, told", _dtype),
    Rule(
        "the dtype",
        "`dtype` of config.json and of its `text_config`",
        "config.json's own, told",
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
        "config.json, told",
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
        "all of them end it, told",
        None,
    ),
    Rule(
        "the end of a text",
        "`eos_token` of the tokenizer and `eos_token_id` of these files",
        "all of them end it, told",
        None,
    ),
    Rule(
        "any of these",
        "config.json and `hf_overrides`",
        "there is no such option: it is refused, and config.json is to be changed",
        None,
    ),
)
"""Every fact that a checkpoint can state in two places. The page on models is written from it."""
