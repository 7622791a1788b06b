"""The fallbacks for models that read pictures, or hear recordings, and write text: a class of
transformers, which computes all tokens of a sequence, and its media, in each step."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import transformers
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import FallbackModel, torch_dtype
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.examine import check_config, read_by_class, understood
from toolkit_lm_transformers.image_text_rules import AUDIO_KEYS, IMAGE_KEYS, media_token
from toolkit_lm_transformers.layout import CacheLayout, recomputing
from toolkit_lm_transformers.model import SECONDS, TransformersForCausalLM
from toolkit_lm_transformers.pictures import PicturesPart, Reading, SeeingDecoder
from toolkit_lm_transformers.uninitialized import Uninitialized

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_REFUSED = {
    "diffusion_gemma": "it writes blocks of tokens by diffusion",
    "kyutai_speech_to_text": "each token of its output hears a part of the recording",
    "mllama": "its cross attention has a mask of tokens and tiles, which grows with the output",
    "paligemma": "its prompt attends to itself in both directions, chunks of it cannot",
    "vibevoice": "it writes speech by diffusion",
    "voxtral_realtime": "each token of its output hears a part of the recording",
}
"""Reasons by model_type."""


class Listed(NamedTuple):
    """Models of a modality, as transformers lists them."""

    noun: str
    mappings: tuple[Mapping[str, Any], ...]
    token_keys: tuple[str, ...]
    """Keys of config.json that name the token whose embeddings media replace."""

    def names(self) -> set[str]:
        return {
            name
            for mapping in self.mappings
            for names in mapping.values()
            for name in ([names] if isinstance(names, str) else list(names))
        }


IMAGES = Listed("pictures", (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,), IMAGE_KEYS)
RECORDINGS = Listed(
    "recordings",
    (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    AUDIO_KEYS,
)


class TransformersForImageText(TransformersForCausalLM):
    """Any model of transformers that is listed for pictures and text, and has a decoder alone.

    It has the modules of the transformers model, under the same names. Each step hands the ids of
    all tokens of a sequence to the model's forward, with all arrays of its pictures that the
    processor made, by their names.
    """

    parts = {"media": PicturesPart}
    listed: ClassVar[Listed] = IMAGES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        FallbackModel.__init__(self, vllm_config=vllm_config, prefix=prefix)
        layout = examine_media(vllm_config, self.listed)
        self.first_position = 0
        with deadline(SECONDS, "make the model"), Uninitialized():
            config = _read(vllm_config, self.listed)
            model = _build(config, torch_dtype(vllm_config.model.dtype))
        self._adopt(model)
        logger.warning(
            "%s computes all tokens and %s of a sequence in each step, so that work grows with "
            "the square of the length: %s",
            type(model).__name__,
            self.listed.noun,
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
            reading=Reading(
                accepted_by(model), media_token(vllm_config.hf_config, self.listed.token_keys)
            ),
        )
        self.seeing.decode = self._whole
        self.current_rows = self.seeing.rows
        self.past_key_values = self.seeing
        self._embed = model.get_input_embeddings().__call__
        self._mix_by = model.set_experts_implementation
        self._mixes_by = model.config._experts_implementation
        self._convert = Conversion(model)

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        try:
            examine_media(vllm_config, cls.listed)
        except UnsupportedError as error:
            return str(error)
        return None

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        found = [names[model_type] for names in cls.listed.mappings if model_type in names]
        return found[0] if found and isinstance(found[0], str) else None

    @classmethod
    def reserved_positions(cls, vllm_config: VllmConfig) -> int:
        return 0


class TransformersForAudioText(TransformersForImageText):
    """Any model of transformers that hears recordings among the tokens of its prompt."""

    listed = RECORDINGS


def _read(vllm_config: VllmConfig, listed: Listed) -> Any:
    """The checkpoint's config as transformers holds it. Raises UnsupportedError where transformers
    lists no class of such media and text for it."""
    values = vllm_config.hf_config
    name = values["architectures"][0]
    if name not in listed.names():
        raise UnsupportedError(f"{name} of transformers is not a model of {listed.noun} and text")
    return read_by_class(values, name)


def examine_media(vllm_config: VllmConfig, listed: Listed) -> CacheLayout:
    """The state that a sequence keeps between steps. Raises UnsupportedError, with the reason, if
    the checkpoint's model cannot run here."""
    config = _read(vllm_config, listed)
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
    if media_token(vllm_config.hf_config, listed.token_keys) is None:
        raise UnsupportedError(f"its config.json names no token of {listed.noun}")
    with torch.device("meta"):
        model = understood(lambda: _build(config, torch.bfloat16), "make the model")
    if needed := _needed_by(model):
        raise UnsupportedError(f"it reads no text without {' and '.join(needed)}")
    return recomputing(model, True, f"its {listed.noun} enter by its own code")


def _needed_by(model: Any) -> list[str]:
    """Names of arguments, other than tokens, without which a model's forward does not run."""
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name != "input_ids"
    ]


def accepted_by(model: Any) -> frozenset[str]:
    """Names of arguments that a model's forward takes, by itself or for its parts."""
    names: set[str] = set()
    for function in (
        model.forward,
        getattr(model.base_model, "forward", None),
        getattr(model, "get_image_features", None),
        getattr(model, "get_audio_features", None),
    ):
        if function is not None:
            names |= set(inspect.signature(function).parameters)
    return frozenset(names)


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
