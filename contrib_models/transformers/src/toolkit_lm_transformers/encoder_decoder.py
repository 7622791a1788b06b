"""The fallback for encoder-decoder models of text: the encoder of transformers computes a prompt
once, and its decoder all tokens of a sequence in each step."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import transformers
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import EncoderInput
from toolkit_lm.model import FallbackModel, torch_dtype
from toolkit_lm.parts import EncoderPart
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.encoded import (
    EncodedDecoder,
    alike,
    logits_of_pair,
    takes_rows_alone,
)
from toolkit_lm_transformers.examine import check_config, read_by_class, understood
from toolkit_lm_transformers.layout import CacheLayout, recomputing
from toolkit_lm_transformers.model import SECONDS, TransformersForCausalLM
from toolkit_lm_transformers.pooling import width_of
from toolkit_lm_transformers.uninitialized import Uninitialized

logger = logging.getLogger(__name__)


class ExaminedPair(NamedTuple):
    """Facts about an encoder-decoder model that can run here."""

    config: Any
    layout: CacheLayout
    encoder_width: int
    """Numbers of a token in the encoder's states."""


class TransformersForEncoderDecoder(TransformersForCausalLM):
    """Any encoder-decoder model of text of transformers. It has the modules of the transformers
    model, under the same names."""

    parts = {"encoder": EncoderPart}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        FallbackModel.__init__(self, vllm_config=vllm_config, prefix=prefix)
        examined = self.examine(vllm_config)
        self.first_position = 0
        with deadline(SECONDS, "make the model"), Uninitialized():
            model = build_pair(examined.config, torch_dtype(vllm_config.model.dtype))
        self._adopt(model)
        logger.warning(
            "%s computes all decoder tokens of a sequence in each step, so that work grows with "
            "the square of the output: %s",
            type(model).__name__,
            examined.layout.why_recomputed,
        )
        self._whole: Callable[..., Any] = model.__call__
        self._decode = self._whole
        self._project = None
        self.pair = EncodedDecoder(
            examined.layout,
            model.config,
            examined.encoder_width,
            vllm_config=vllm_config,
            prefix=prefix,
        )
        self.pair.decode = self._whole
        self.past_key_values = self.pair
        self.encoder_width = examined.encoder_width
        self._alone = takes_rows_alone(model.config)
        self._encoder: Callable[..., Any] = self.encoder_of(model).__call__
        self._example: list[int] = [0]
        self._embed = model.get_input_embeddings().__call__
        self._mix_by = model.set_experts_implementation
        self._mixes_by = model.config._experts_implementation
        self._convert = Conversion(model)

    @classmethod
    def examine(cls, vllm_config: VllmConfig) -> ExaminedPair:
        """Raises UnsupportedError, with the reason, if the checkpoint's model cannot run here."""
        return examine_pair(vllm_config)

    @classmethod
    def encoder_of(cls, model: Any) -> Any:
        return model.get_encoder()

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        try:
            cls.examine(vllm_config)
        except UnsupportedError as error:
            return str(error)
        return None

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        name: Any = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        return name if isinstance(name, str) else None

    @classmethod
    def reserved_positions(cls, vllm_config: VllmConfig) -> int:
        return 0

    def encode(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """States [E, H] of the encoder sequences, each of which begins at position 0."""
        starts = positions.eq(0).nonzero().flatten().tolist()
        rows = [torch.arange(*ends) for ends in pairwise([*starts, len(positions)])]
        out = next(self.parameters()).new_empty(len(input_ids), self.encoder_width)
        for places in alike(map(len, rows), alone=self._alone):
            index = torch.stack([rows[place] for place in places]).to(out.device)
            out[index] = self._encoder(input_ids=input_ids[index])[0].to(out.dtype)
        return out

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        out = next(self.parameters()).new_empty(len(input_ids), self.pair.layout.width)
        states = [] if encoder_hidden_states is None else [encoder_hidden_states]
        return self.pair.run(input_ids, *states, out=out)

    def example_input(self, num_tokens: int) -> EncoderInput:
        """Tokens of a warm-up, which `plain` reads as well."""
        self._example = [3 + index % 4 for index in range(num_tokens)]
        return EncoderInput.of_tokens(self._example)

    def plain(self, token_ids: Tensor, *, exact: bool = False) -> Tensor:
        prompt = torch.tensor([self._example], device=token_ids.device)
        with deadline(SECONDS, f"compute {len(token_ids)} tokens"), self._exactly(exact):
            logits: Tensor = self._whole(
                input_ids=prompt, decoder_input_ids=token_ids[None], use_cache=False
            ).logits
        return logits[0]


def examine_pair(vllm_config: VllmConfig) -> ExaminedPair:
    """Examines the checkpoint's model. Raises UnsupportedError, with the reason, if it cannot run
    here."""
    values = vllm_config.hf_config
    name = values["architectures"][0]
    if name not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values():
        sees = name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
        if sees and read_by_class(values, name).is_encoder_decoder:
            raise UnsupportedError(
                f"the encoder of {name} reads pictures, and those of this fallback read text"
            )
        raise UnsupportedError(f"{name} of transformers is not an encoder-decoder model of text")
    config = read_by_class(values, name)
    if not config.is_encoder_decoder:
        raise UnsupportedError(f"{name} has no encoder of text")
    check_config(config, vllm_config)
    with torch.device("meta"):
        model = understood(lambda: build_pair(config, torch.float32), "make the model")
    encoder = model.get_encoder()
    if "input_ids" not in inspect.signature(encoder.forward).parameters:
        raise UnsupportedError(f"the encoder of {name} takes no tokens")
    if "decoder_input_ids" not in inspect.signature(model.forward).parameters:
        raise UnsupportedError(f"{name} takes no decoder_input_ids")
    width = understood(lambda: width_of(encoder, "embedding"), "run its encoder on shapes alone")
    layout = recomputing(model, True, "its cross attention reads the encoder by its own code")
    vocabulary = understood(
        lambda: width_of_logits(model, width), "run its decoder on shapes alone"
    )
    return ExaminedPair(config, layout._replace(width=vocabulary), width)


@torch.no_grad()
def width_of_logits(model: Any, width: int) -> int:
    """Size of the vocabulary of logits, by a pass over shapes. If that needs values, it is the
    head's."""
    states = torch.empty(1, 3, width, device="meta")
    tokens = torch.zeros(1, 2, dtype=torch.long, device="meta")
    try:
        return int(logits_of_pair(model, states, tokens).shape[-1])
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        return int(model.get_output_embeddings().weight.shape[0])


def build_pair(config: Any, dtype: torch.dtype) -> Any:
    """A model of transformers on the default device, in eval mode, whose parameters hold
    anything."""
    name = config.architectures[0]
    return getattr(transformers, name)._from_config(config, dtype=dtype).eval()
