"""The fallback for encoder-decoder models whose encoder hears, and the models that label frames of
a recording (CTC)."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import Array, EncoderInput
from toolkit_lm.model import FallbackModel, torch_dtype
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CTC_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.encoded import EncodedDecoder, alike
from toolkit_lm_transformers.encoder_decoder import (
    ExaminedPair,
    TransformersForEncoderDecoder,
    build_pair,
    width_of_logits,
)
from toolkit_lm_transformers.examine import check_config, read_by_class, understood
from toolkit_lm_transformers.layout import IDS, CacheLayout, recomputing
from toolkit_lm_transformers.model import SECONDS
from toolkit_lm_transformers.recordings import Shapes, blank_of
from toolkit_lm_transformers.uninitialized import Uninitialized

_REFUSED = {
    "pop2piano": "it hears music and writes notes",
    "dia": "it writes speech",
}
"""Reasons by model_type."""


class ExaminedSpeech(NamedTuple):
    """Facts about a model that hears, and its encoder on shapes alone."""

    pair: ExaminedPair
    shapes: Shapes


class TransformersForSpeech(TransformersForEncoderDecoder):
    """Any encoder-decoder model of transformers whose encoder hears. Each recording is computed
    with those of its length."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._shapes = examine_speech(vllm_config).shapes
        self._most = vllm_config.max_encoder_len or vllm_config.max_model_len
        self._sound = torch.zeros(0)

    @classmethod
    def examine(cls, vllm_config: VllmConfig) -> ExaminedPair:
        return examine_speech(vllm_config).pair

    @classmethod
    def encoder_of(cls, model: Any) -> Any:
        return hearing_part(model)

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        name: Any = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(model_type)
        return name if isinstance(name, str) else None

    def encode(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, features: list[Tensor]
    ) -> Tensor:
        """States [E, H] of recordings, each of which begins at position 0."""
        starts = positions.eq(0).nonzero().flatten().tolist()
        rows = [slice(*ends) for ends in pairwise([*starts, len(positions)])]
        found: list[Tensor | None] = [None] * len(rows)
        for places in alike((each.shape for each in features), alone=self._alone):
            states = self._heard(torch.stack([features[place] for place in places]))
            for place, each in zip(places, states, strict=True):
                assert len(each) == rows[place].stop - rows[place].start, "Shapes counts them"
                found[place] = each
        return torch.cat([each for each in found if each is not None])

    def _heard(self, features: Tensor) -> Tensor:
        """States [B, E, H] of features of equal lengths."""
        states: Tensor = self._encoder(
            features.to(next(self.parameters()).dtype), **self._mask(features)
        )[0]
        return states

    def _mask(self, features: Tensor) -> dict[str, Tensor]:
        """All of the features are seen. Without a mask, some encoders have no windows either."""
        encoder: Any = self._encoder.__self__  # type: ignore[attr-defined]
        if "attention_mask" not in inspect.signature(encoder.forward).parameters:
            return {}
        size = features.shape[:2]
        return {"attention_mask": torch.ones(size, dtype=torch.long, device=features.device)}

    def example_input(self, num_tokens: int) -> EncoderInput:
        """Noise of a warm-up, which `plain` hears as well."""
        shape = self._shapes.example(min(self._most, max(num_tokens, 1)))
        sound = np.random.default_rng(0).standard_normal(shape, np.float32)
        self._sound = torch.from_numpy(sound)
        return EncoderInput(num_tokens=self._shapes.states(shape)[0], features=Array.of(sound))

    def plain(self, token_ids: Tensor, *, exact: bool = False) -> Tensor:
        features = self._sound[None].to(token_ids.device, next(self.parameters()).dtype)
        name = "input_values" if features.ndim == 2 else "input_features"
        if name not in inspect.signature(self._forward_of_whole).parameters:
            name = "inputs"
        with deadline(SECONDS, f"compute {len(token_ids)} tokens"), self._exactly(exact):
            logits: Tensor = self._whole(
                **{name: features},
                **self._mask(features),
                decoder_input_ids=token_ids[None],
                use_cache=False,
            ).logits
        return logits[0]

    @property
    def _forward_of_whole(self) -> Callable[..., Any]:
        model: Any = self._whole.__self__  # type: ignore[attr-defined]
        forward: Callable[..., Any] = model.forward
        return forward


class Spelled(NamedTuple):
    """A result of `TransformersForCTC.spell`."""

    logits: Tensor
    """[B, T, V]: -inf but for the token that comes next."""


class TransformersForCTC(TransformersForSpeech):
    """A model of transformers that labels the frames of a recording.

    The encoder is the whole model: it gives the likeliest label of each frame. The decoder spells
    them: at each step the next label that is neither blank nor the label of the frame before, and
    after the last the blank, which ends the text.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        FallbackModel.__init__(self, vllm_config=vllm_config, prefix=prefix)
        examined = examine_ctc(vllm_config)
        self._shapes = examined.shapes
        self._most = vllm_config.max_encoder_len or vllm_config.max_model_len
        self.first_position = 0
        with deadline(SECONDS, "make the model"), Uninitialized():
            model = build_pair(examined.pair.config, torch_dtype(vllm_config.model.dtype))
        self._adopt(model)
        self._encoder = model.__call__
        self._alone = False
        self._project = None
        self.blank = blank_of(vllm_config)
        self.num_labels = examined.pair.layout.width
        self.pair = EncodedDecoder(
            examined.pair.layout,
            model.config,
            1,
            vllm_config=vllm_config,
            prefix=prefix,
            dtype=torch.float32,
        )
        self.pair.decode = self.spell
        self.past_key_values = self.pair
        self._convert = Conversion(model)

    @classmethod
    def examine(cls, vllm_config: VllmConfig) -> ExaminedPair:
        return examine_ctc(vllm_config).pair

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        name: Any = MODEL_FOR_CTC_MAPPING_NAMES.get(model_type)
        return name if isinstance(name, str) else None

    def _heard(self, features: Tensor) -> Tensor:
        """Labels [B, E, 1] of frames, as float32, which holds those of any vocabulary."""
        return super()._heard(features).argmax(dim=-1, keepdim=True).float()

    def spell(self, encoder_outputs: Any, decoder_input_ids: Tensor, use_cache: bool) -> Spelled:
        """Logits of the labels [B, E, 1] of frames, for as many tokens as there are decoder ids."""
        count = decoder_input_ids.shape[1]
        labels = encoder_outputs.last_hidden_state[..., 0].long()
        spelled = labels.new_full((len(labels), count), self.blank)
        for row, frames in enumerate(labels.tolist()):
            text = [label for label, _ in itertools.groupby(frames) if label != self.blank]
            spelled[row, : len(text)] = spelled.new_tensor(text[:count])
        logits = torch.full((*spelled.shape, self.num_labels), -torch.inf, device=spelled.device)
        return Spelled(logits.scatter_(-1, spelled[..., None], 0.0))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        raise UnsupportedError("its decoder has no embeddings")

    def plain(self, token_ids: Tensor, *, exact: bool = False) -> Any:
        """None: the frames are computed by transformers' own code alone."""
        return None


def hearing_part(model: Any) -> Any:
    """The encoder of a model that hears."""
    encoder = model.get_encoder()
    if {"input_features", "input_values"} & set(inspect.signature(encoder.forward).parameters):
        return encoder
    if model.config.model_type == "speech-encoder-decoder":
        return encoder
    # A model that reads text, too, has two.
    return model.get_encoder(modality="audio")


def examine_speech(vllm_config: VllmConfig) -> ExaminedSpeech:
    """Examines the checkpoint's model. Raises UnsupportedError, with the reason, if it cannot run
    here."""
    values = vllm_config.hf_config
    name = values["architectures"][0]
    if name in MODEL_FOR_CTC_MAPPING_NAMES.values():
        return examine_ctc(vllm_config)
    if name not in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.values():
        raise UnsupportedError(f"{name} of transformers is not an encoder-decoder model that hears")
    config = read_by_class(values, name)
    if reason := _REFUSED.get(config.model_type):
        raise UnsupportedError(reason)
    if not config.is_encoder_decoder:
        raise UnsupportedError(f"{name} has no encoder beside its decoder")
    check_config(config, vllm_config)
    with torch.device("meta"):
        model = understood(lambda: build_pair(config, torch.float32), "make the model")
    shapes = Shapes(model, understood(lambda: hearing_part(model), "find its encoder"))
    _, width = understood(
        lambda: shapes.states(shapes.example(64)), "run its encoder on shapes alone"
    )
    layout = recomputing(model, True, "its cross attention reads the encoder by its own code")
    vocabulary = understood(
        lambda: width_of_logits(model, width), "run its decoder on shapes alone"
    )
    return ExaminedSpeech(ExaminedPair(config, layout._replace(width=vocabulary), width), shapes)


def examine_ctc(vllm_config: VllmConfig) -> ExaminedSpeech:
    """Examines a checkpoint that labels frames. Raises UnsupportedError, with the reason, if it
    cannot run here."""
    values = vllm_config.hf_config
    config = read_by_class(values, values["architectures"][0])
    check_config(config, vllm_config)
    with torch.device("meta"):
        model = understood(lambda: build_pair(config, torch.float32), "make the model")
    shapes = Shapes(model, model)
    _, width = understood(lambda: shapes.states(shapes.example(64)), "run it on shapes alone")
    layout = CacheLayout(None, (IDS,), (), width, True, "it labels frames")
    return ExaminedSpeech(ExaminedPair(config, layout, 1), shapes)
