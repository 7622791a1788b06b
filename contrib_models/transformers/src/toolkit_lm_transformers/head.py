"""A causal language model of transformers without its decoder: from hidden states to logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
)


class _NothingElse:
    """Other results of models, which others hand on: nothing."""

    def __getattr__(self, name: str) -> None:
        """Returns None. Raises AttributeError for names of Python's own."""
        if name.startswith("__"):
            raise AttributeError(name)


@dataclass
class _HiddenStates(_NothingElse, BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """Return value of decoders of all families."""


@dataclass
class EncoderStates(_NothingElse, BaseModelOutput):  # type: ignore[misc]
    """Return value of encoders of all families."""


class _Given(nn.Module):
    """Stands for a decoder: what goes in as embeddings comes out as hidden states."""

    @property
    def decoder(self) -> _Given:
        """Some heads call the decoder within the decoder (OPT)."""
        return self

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def decoder_of(model: Any) -> tuple[str, Any] | None:
    """Name of a model's decoder among its modules, and the decoder. None: it cannot be told from
    the head."""
    for name in (model.base_model_prefix, "model"):
        decoder = model._modules.get(name)
        if decoder is not None:
            return name, decoder
    return None


def without_decoder(model: Any) -> Any:
    """`model` from its hidden states on: the head, and whatever its family does to logits. It
    shares the parameters."""
    found = decoder_of(model)
    assert found is not None, "it has no decoder"
    head = copy.copy(model)
    head._modules = {**model._modules, found[0]: _Given()}
    return head
