"""Prompt rules of ColPali and ColQwen2, and how processors for retrieval read pictures and queries.
Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer
from toolkit_lm.config import PoolingProfile, VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig
from toolkit_lm_poolers.details import PoolingDetails, RoleProfile

from toolkit_lm_vision.paligemma_rules import PaliGemmaRules
from toolkit_lm_vision.qwen2_vl_rules import Qwen2VLRules

_AUGMENTED = 10
"""Tokens that follow a query: the processors' query_augmentation_token."""
_FILES = ("processor_config.json", "preprocessor_config.json")
_TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class ColPaliRules(PaliGemmaRules):
    """Rules of PaliGemma."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(language_and_vision(config))


class ColQwen2Rules(Qwen2VLRules):
    """Rules of Qwen2-VL for pictures."""

    modalities = ("image",)

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(language_and_vision(config))


def language_and_vision(config: VllmConfig) -> VllmConfig:
    """The config of the language model that sees, which stands in config.json as `vlm_config`."""
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    hf_config: dict[str, Any] = HFConfig(config.hf_config).require("vlm_config", dict)
    return config.with_checkpoint(msgspec.structs.replace(config.checkpoint, hf_config=hf_config))


def read_profile(folder: Path, hf_config: dict[str, Any], tokenizer: Path) -> PoolingProfile | None:
    """Profile of a model for retrieval: how its processor reads a query and a picture. None for
    another model, and for a checkpoint without a tokenizer.

    Source: processing_colpali.py, processing_colqwen2.py and processing_colmodernvbert.py of
    transformers. Raises CheckpointError.
    """
    texts = _TEXTS.get(hf_config.get("model_type", ""))
    if texts is None or not any((tokenizer / file).is_file() for file in _TOKENIZER_FILES):
        return None
    settings: dict[str, Any] = {}
    for name in _FILES:
        settings = {**_json(folder / name), **settings}
    role, picture = texts(settings, tokenizer)
    return PoolingDetails(
        folder=str(folder),
        is_complete=True,
        roles={"query": role, "document": role},
        similarity="maxsim",
        picture=picture,
    ).as_profile()


def _colpali(settings: dict[str, Any], tokenizer: Path) -> tuple[RoleProfile, str]:
    """The texts around a query, and that in which a picture stands."""
    begin = _token(tokenizer, "bos_token")
    described = _text(settings, "visual_prompt_prefix", "Describe the image.")
    return RoleProfile(
        prompt=begin + _text(settings, "query_prefix", "Question: "),
        suffix=f"{_token(tokenizer, 'pad_token') * _AUGMENTED}\n",
    ), f"<image>{begin}{described}\n"


def _colqwen2(settings: dict[str, Any], tokenizer: Path) -> tuple[RoleProfile, str]:
    picture = _text(
        settings,
        "visual_prompt_prefix",
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image."
        "<|im_end|><|endoftext|>",
    )
    return RoleProfile(
        prompt=_text(settings, "query_prefix", "Query: "),
        suffix=f"{_token(tokenizer, 'pad_token') * _AUGMENTED}\n",
    ), picture


def _colmodernvbert(settings: dict[str, Any], tokenizer: Path) -> tuple[RoleProfile, str]:
    before, after = _special_tokens(tokenizer)
    picture = _text(
        settings,
        "visual_prompt_prefix",
        "<|begin_of_text|>User:<image>Describe the image.<end_of_utterance>\nAssistant:",
    )
    return RoleProfile(
        prompt=before + _text(settings, "query_prefix", ""),
        suffix="<end_of_utterance>" * _AUGMENTED + after,
    ), before + picture + after


_TEXTS = {"colpali": _colpali, "colqwen2": _colqwen2, "colmodernvbert": _colmodernvbert}
"""Texts of the processors, by `model_type`."""


def _special_tokens(folder: Path) -> tuple[str, str]:
    """Texts of the special tokens that the tokenizer puts before and after a text. Raises
    CheckpointError."""
    path = folder / "tokenizer.json"
    try:
        found = Tokenizer.from_file(str(path)).encode("a")
    except Exception as error:  # whatever tokenizers raises where there is no file, or a broken one
        raise CheckpointError(f"{str(path)!r} is no tokenizer: {error}") from error
    if 0 not in found.special_tokens_mask:
        return "", ""
    start = found.special_tokens_mask.index(0)
    end = len(found.tokens) - found.special_tokens_mask[::-1].index(0)
    return "".join(found.tokens[:start]), "".join(found.tokens[end:])


def _text(settings: dict[str, Any], name: str, default: str) -> str:
    return HFConfig(settings).get(name, str) or default


def _token(folder: Path, name: str) -> str:
    """Text of a special token. Raises CheckpointError where the tokenizer states none."""
    for file in _TOKENIZER_FILES:
        found = _json(folder / file).get(name)
        if isinstance(found, dict):
            found = found.get("content")
        if isinstance(found, str):
            return found
    raise CheckpointError(
        f"{str(folder / 'tokenizer_config.json')!r} states no {name!r}, which queries and pictures "
        "are read with."
    )


def _json(file: Path) -> dict[str, Any]:
    """Values of a JSON file; {} where there is none."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{str(file)!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{str(file)!r} must hold a JSON object.")
    return found
