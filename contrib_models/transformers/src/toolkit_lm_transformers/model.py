"""The fallback: a causal language model of transformers, on our paged attention."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import FallbackModel, IntermediateTensors, join, torch_dtype
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from toolkit_lm_transformers.attention import LAYER
from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.examine import build, examine, read_config
from toolkit_lm_transformers.uninitialized import Uninitialized


class TransformersForCausalLM(FallbackModel):
    """Any causal language model of transformers whose attention goes through transformers' attention interface.

    It has the modules of the transformers model, under the same names, and an Attention layer in each attention module.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        calls = examine(vllm_config)
        with Uninitialized():
            model = build(read_config(vllm_config), torch_dtype(vllm_config.model.dtype), vllm_config.model.trust_remote_code)
        for name, call in calls.items():
            layer = Attention(
                call.num_heads,
                call.head_size,
                vllm_config=vllm_config,
                prefix=join(prefix, name),
                scale=call.scale,
                num_kv_heads=call.num_kv_heads,
                window=call.window,
                soft_cap=call.soft_cap,
            )
            setattr(model.get_submodule(name), LAYER, layer)
        self._adopt(model)
        self.decoder_name: str = model.base_model_prefix
        self._decode: Callable[..., Any] = model.base_model.__call__
        self._embed: Callable[..., Any] = model.get_input_embeddings().__call__
        self._project: Callable[..., Any] = _without_decoder(model).__call__
        self._convert = Conversion(model)

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        try:
            examine(vllm_config)
        except UnsupportedError as error:
            return str(error)
        return None

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of `input_ids` [T], of which `forward` takes others as `inputs_embeds`."""
        embedded: Tensor = self._embed(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor:
        # For transformers the flat batch is one sequence; only attention, which is ours, knows better.
        given = {"input_ids": input_ids[None]} if inputs_embeds is None else {"inputs_embeds": inputs_embeds[None]}
        hidden_states: Tensor = self._decode(**given, position_ids=positions[None], use_cache=False)[0]
        return hidden_states[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self._project(inputs_embeds=hidden_states[None], use_cache=False).logits
        return logits[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._convert(weights))

    def _adopt(self, model: nn.Module) -> None:
        """Takes over what `model` holds, so that weights and layers have the checkpoint's names."""
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in model._non_persistent_buffers_set)


@dataclass
class _HiddenStates(BaseModelOutputWithPastAndCrossAttentions):  # type: ignore[misc]
    """What decoders of all families return."""

    router_logits: tuple[Tensor, ...] | None = None


class _Given(nn.Module):
    """Stands for a decoder: what goes in as embeddings comes out as hidden states."""

    def forward(self, *args: object, inputs_embeds: Tensor, **kwargs: object) -> _HiddenStates:
        return _HiddenStates(last_hidden_state=inputs_embeds)


def _without_decoder(model: Any) -> Any:
    """`model` from its hidden states on: the head, and whatever its family does to logits. It shares the parameters."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}
    return head
