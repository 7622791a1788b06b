"""The fallback for models that read pictures and write text: a class of transformers, which
computes all tokens of a sequence, and its pictures, in each step."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import FallbackModel, torch_dtype
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.examine import check_config, read_by_class, understood
from toolkit_lm_transformers.image_text_rules import image_token
from toolkit_lm_transformers.layout import CacheLayout, recomputing
from toolkit_lm_transformers.model import SECONDS, TransformersForCausalLM
from toolkit_lm_transformers.pictures import PicturesPart, Reading, SeeingDecoder
from toolkit_lm_transformers.uninitialized import Uninitialized

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_REFUSED = {
    "diffusion_gemma": "it writes blocks of tokens by diffusion",
    "mllama": "its cross attention has a mask of tokens and tiles, which grows with the output",
    "paligemma": "its prompt attends to itself in both directions, chunks of it cannot",
}
"""Reasons by model_type."""


class TransformersForImageText(TransformersForCausalLM):
    """Any model of transformers that is listed for pictures and text, and has a decoder alone.

    It has the modules of the transformers model, under the same names. Each step hands the ids of
    all tokens of a sequence to the model's forward, with all arrays of its pictures that the
    processor made, by their names.
    """

    parts = {"media": PicturesPart}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        FallbackModel.__init__(self, vllm_config=vllm_config, prefix=prefix)
        layout = examine_image_text(vllm_config)
        self.first_position = 0
        with deadline(SECONDS, "make the model"), Uninitialized():
            model = _build(read_image_text(vllm_config), torch_dtype(vllm_config.model.dtype))
        self._adopt(model)
        logger.warning(
            "%s computes all tokens and pictures of a sequence in each step, so that work grows "
            "with the square of the length: %s",
            type(model).__name__,
            layout.why_recomputed,
        )
        self._whole: Callable[..., Any] = model.__call__
        self._decode = self._whole
        self._project = None
        self.seeing = SeeingDecoder(
            layout,
            model.config,
            vllm_config=vllm_config,
            prefix=prefix,
            reading=Reading(accepted_by(model), image_token(vllm_config.hf_config)),
        )
        self.seeing.decode = self._whole
        self.past_key_values = self.seeing
        self._embed = model.get_input_embeddings().__call__
        self._mix_by = model.set_experts_implementation
        self._mixes_by = model.config._experts_implementation
        self._convert = Conversion(model)

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        try:
            examine_image_text(vllm_config)
        except UnsupportedError as error:
            return str(error)
        return None

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        name: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
        return name if isinstance(name, str) else None

    @classmethod
    def reserved_positions(cls, vllm_config: VllmConfig) -> int:
        return 0


def read_image_text(vllm_config: VllmConfig) -> Any:
    """The checkpoint's config as transformers holds it. Raises UnsupportedError where transformers
    lists no class of pictures and text for it."""
    values = vllm_config.hf_config
    name = values["architectures"][0]
    if name not in _names():
        raise UnsupportedError(f"{name} of transformers is not a model of pictures and text")
    return read_by_class(values, name)


def examine_image_text(vllm_config: VllmConfig) -> CacheLayout:
    """The state that a sequence keeps between steps. Raises UnsupportedError, with the reason, if
    the checkpoint's model cannot run here."""
    config = read_image_text(vllm_config)
    name = vllm_config.hf_config["architectures"][0]
    if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() and not _has_processor(vllm_config):
        raise UnsupportedError(
            f"without {' or '.join(PROCESSOR_FILES)} it is a model of text, which the fallback "
            "'transformers' runs"
        )
    if reason := _REFUSED.get(config.model_type):
        raise UnsupportedError(reason)
    check_config(config, vllm_config)
    if config.is_encoder_decoder or getattr(config.get_text_config(), "is_encoder_decoder", False):
        raise UnsupportedError("it is an encoder-decoder model")
    if image_token(vllm_config.hf_config) is None:
        raise UnsupportedError("its config.json names no token of pictures")
    with torch.device("meta"):
        model = understood(lambda: _build(config, torch.bfloat16), "make the model")
    return recomputing(model, True, "its pictures enter by its own code")


def accepted_by(model: Any) -> frozenset[str]:
    """Names of arguments that a model's forward takes, by itself or for its parts."""
    names: set[str] = set()
    for function in (
        model.forward,
        getattr(model.base_model, "forward", None),
        getattr(model, "get_image_features", None),
    ):
        if function is not None:
            names |= set(inspect.signature(function).parameters)
    return frozenset(names)


def _names() -> set[str]:
    named = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    return {
        name for names in named for name in ([names] if isinstance(names, str) else list(names))
    }


def _has_processor(vllm_config: VllmConfig) -> bool:
    checkpoint = vllm_config.checkpoint
    return checkpoint is not None and any(
        (Path(checkpoint.path) / name).is_file() for name in PROCESSOR_FILES
    )


def _build(config: Any, dtype: torch.dtype) -> Any:
    """A model of transformers on the default device, in eval mode, whose parameters hold
    anything."""
    name = config.architectures[0]
    return getattr(transformers, name)._from_config(config, dtype=dtype).eval()
