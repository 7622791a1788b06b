"""A causal language model of transformers without its decoder: from hidden states to logits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions


@dataclass
class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """Return value of decoders of all families."""

    router_logits: tuple[Tensor, ...] | None = None
    image_hidden_states: Tensor | None = None
    audio_hidden_states: Tensor | None = None


class _Given(nn.Module):
    """Stands for a decoder: what goes in as embeddings comes out as hidden states."""

    @property
    def decoder(self) -> _Given:
        """Some heads call the decoder within the decoder (OPT)."""
        return self

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def without_decoder(model: Any) -> Any:
    """`model` from its hidden states on: the head, and whatever its family does to logits. It
    shares the parameters."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}
    return head
