"""The tokenizer of a folder in Hugging Face layout as metadata of a GGUF file: the reverse of
`toolkit_lm_gguf.tokenizer`. Needs no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from toolkit_lm.errors import CheckpointError, UnsupportedError

from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.tokenizer import GPT2, SPACE, SPLITS, WHOLE_WORDS, tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_PROBE = (
    "The quick brown fox, isn't it?  3.14159 + 2_000 = x; don't WE'LL\n\n\tif (a<b) { return 0; }"
    "\r\n naïve Ünïcode Привет мир 中文字符 2024年 日本語 héllo \N{GRINNING FACE} https://a.b/c?d=e#f"
)
"""What the tokenizer of a file must cut as the folder's does."""


def tokenizer_metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys about the tokenizer, and the chat template. Raises UnsupportedError for a tokenizer
    that files cannot state."""
    stated = _json(folder / "tokenizer.json")
    options = _json(folder / "tokenizer_config.json", {})
    model = stated["model"]
    added = {token["id"]: token for token in stated.get("added_tokens") or ()}
    kind, own = _kind(stated)
    texts = {index: text for text, index in model["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    size = config["vocab_size"]
    if texts and max(texts) >= size:
        raise CheckpointError(
            f"{folder}: tokenizer.json has a token {max(texts)}, and the model's vocabulary {size}"
        )
    unknown = model.get("unk_token")
    types = [_type(index, texts.get(index), added, unknown, kind) for index in range(size)]
    ids = {text: index for index, text in texts.items()}
    found = {
        "model": kind,
        "tokens": [_text(texts.get(index), types[index], index, kind) for index in range(size)],
        "token_type": types,
        **own,
        **_special(folder, config, options, ids),
        "unknown_token_id": ids.get(unknown),
        **_templates(folder, options),
    }
    if kind == "llama":
        found["scores"] = _scores(model, texts, size)
    found |= _around(folder, found)
    return {
        key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value
        for key, value in found.items()
        if value is not None
    }


def check_tokenizer(file: GGUFFile, folder: Path) -> None:
    """Raises UnsupportedError if the file's tokenizer cuts text otherwise than the folder's."""
    found = tokenizer(file).encode(_PROBE).ids
    expected = _load(folder).encode(_PROBE).ids
    if found != expected:
        raise UnsupportedError(
            f"the tokenizer of {folder} does something that a GGUF file cannot say: of the same "
            f"text it makes {len(expected)} tokens, and the file's {len(found)}"
        )


def _json(path: Path, default: Any = None) -> Any:
    if default is not None and not path.exists():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedError(
            f"{path.parent} has no {path.name}, which the tokenizer of a GGUF file is made from"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _load(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust library has no class of its own for them
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error


def _kind(stated: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """`tokenizer.ggml.model`, and keys that only this kind has."""
    model = stated["model"]
    if model.get("type") != "BPE":
        raise UnsupportedError(
            f"tokenizer.json has a model of the kind {model.get('type')!r}, and GGUF files are "
            "written with BPE: of bytes, or SentencePiece's"
        )
    parts = _parts(stated.get("pre_tokenizer"), "pretokenizers")
    normalizers = _parts(stated.get("normalizer"), "normalizers")
    if model.get("byte_fallback"):
        prefix = any(part["type"] == "Prepend" for part in normalizers) or any(
            part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts
        )
        return "llama", {"add_space_prefix": prefix}
    if other := [part["type"] for part in normalizers if part["type"] != "NFC"]:
        raise UnsupportedError(
            f"tokenizer.json changes text before it is cut ({', '.join(other)}), which a GGUF file "
            "cannot say"
        )
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return "gpt2", {"pre": _pre(parts, bool(model.get("ignore_merges"))), "merges": merges}


def _parts(stated: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The parts of a sequence, or the one that there is."""
    if stated is None:
        return []
    return list(stated[key]) if stated["type"] == "Sequence" else [stated]


def _pre(parts: list[dict[str, Any]], whole_words: bool) -> str:
    """llama.cpp's name of the patterns that cut text into words."""
    patterns: list[str | None] = []
    for part in parts:
        match part:
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                patterns += [GPT2] if part.get("use_regex", True) else []
            case _:
                patterns.append(None)
    for name, known in SPLITS.items():
        if list(known) == patterns and (name in WHOLE_WORDS) == whole_words:
            return name
    shown = ", ".join(part["type"] for part in parts) or "nothing"
    raise UnsupportedError(
        f"tokenizer.json cuts text into words in a way that llama.cpp has no name for ({shown}). "
        f"Able: what it calls {', '.join(SPLITS)}"
    )


def _type(
    index: int,
    text: str | None,
    added: Mapping[int, Mapping[str, Any]],
    unknown: str | None,
    kind: str,
) -> int:
    if text is None:
        return _UNUSED
    if text == unknown and kind == "llama":
        return _UNKNOWN
    if index in added:
        return _CONTROL if added[index].get("special") else _USER_DEFINED
    return _BYTE if kind == "llama" and _BYTE_TOKEN.fullmatch(text) else _NORMAL


def _text(text: str | None, of_type: int, index: int, kind: str) -> str:
    if text is None:
        return f"[PAD{index}]"
    # Such tokens are looked for in text as it was written.
    return text.replace(SPACE, " ") if of_type == _USER_DEFINED and kind == "llama" else text


def _scores(model: Mapping[str, Any], texts: Mapping[int, str], size: int) -> list[float]:
    """Scores that merge in the order of the merges. A token that no merge makes comes last."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        pair = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault("".join(pair), rank)
    last = len(model["merges"])
    return [-float(ranks.get(texts.get(index, ""), last)) for index in range(size)]


def _special(
    folder: Path, config: Mapping[str, Any], options: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Ids of special tokens."""

    def named(name: str) -> int | None:
        token = options.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        return ids.get(str(text))

    def first(value: Any) -> int | None:
        return next(iter(value), None) if isinstance(value, list) else value

    ends = _json(folder / "generation_config.json", {}).get("eos_token_id")
    ends = config.get("eos_token_id") if ends is None else ends
    eos = named("eos")
    eos = first(ends) if eos is None else eos
    all_ends = ends if isinstance(ends, list) else [ends]
    others = [index for index in all_ends if index not in (eos, None)]
    bos = named("bos")
    return {
        "bos_token_id": first(config.get("bos_token_id")) if bos is None else bos,
        "eos_token_id": eos,
        "eot_token_id": first(others),
        "padding_token_id": first(config.get("pad_token_id"))
        if named("pad") is None
        else named("pad"),
    }


def _around(folder: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Whether texts begin with `bos` and end with `eos`."""
    made = _load(folder)
    ids = made.encode("a").ids
    inner = made.encode("a", add_special_tokens=False).ids
    bos, eos = ([found[f"{name}_token_id"]] for name in ("bos", "eos"))
    for begins in (False, True):
        for ends in (False, True):
            if ids == [*(bos if begins else ()), *inner, *(eos if ends else ())]:
                return {"add_bos_token": begins, "add_eos_token": ends}
    raise UnsupportedError(
        f"tokenizer.json puts other tokens around a text than bos {bos[0]} and eos {eos[0]}, which "
        "a GGUF file cannot say"
    )


def _templates(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Chat templates: that of the name "default", and others."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"tokenizer.chat_template": path.read_text(encoding="utf-8")}
    stated = options.get("chat_template")
    if not isinstance(stated, list):
        return {"tokenizer.chat_template": stated}
    named = {entry["name"]: entry["template"] for entry in stated}
    others = [name for name in named if name != "default"]
    return {
        "tokenizer.chat_template": named.get("default"),
        "tokenizer.chat_templates": others or None,
        **{f"tokenizer.chat_template.{name}": named[name] for name in others},
    }
