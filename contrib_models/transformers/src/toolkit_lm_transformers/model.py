"""The fallback: a causal language model of transformers, on our paged attention."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import transformers
from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import FallbackModel, IntermediateTensors, join, torch_dtype
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit_lm_transformers.attention import LAYER, NAME
from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.exact import Exact
from toolkit_lm_transformers.examine import build, examine, read_config
from toolkit_lm_transformers.head import decoder_of, without_decoder
from toolkit_lm_transformers.sequences import Decoder
from toolkit_lm_transformers.uninitialized import Uninitialized

logger = logging.getLogger(__name__)

SECONDS = 300.0
"""Longest time for making a model, and for computing a few tokens."""


class TransformersForCausalLM(FallbackModel):
    """Any causal language model of transformers whose attention goes through transformers'
    attention interface.

    It has the modules of the transformers model, under the same names, and an Attention layer in
    each attention module.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        examined = examine(vllm_config)
        self.first_position = examined.first_position
        config = read_config(vllm_config)
        with deadline(SECONDS, "make the model"), Uninitialized():
            model = build(
                config,
                torch_dtype(vllm_config.model.dtype),
                vllm_config.model.trust_remote_code,
                NAME if examined.layout is None else None,
            )
        for name, call in examined.calls.items():
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
        layout = examined.layout
        is_whole = layout is not None and layout.whole
        if is_whole and vllm_config.model.runner == "pooling":
            raise UnsupportedError(
                f"{type(model).__name__} has no hidden states: its decoder cannot be told from its "
                "head."
            )
        self._whole: Callable[..., Any] = model.__call__
        self._decode: Callable[..., Any] = self._whole
        self._project: Callable[..., Any] | None = None
        if not is_whole:
            found = decoder_of(model)
            assert found is not None, "it was told from its head"
            self.decoder_name, decoder = found
            self._decode = decoder.__call__
            self._project = without_decoder(model).__call__
        self.past_key_values: Decoder | None = None
        if layout is not None and layout.why_recomputed:
            logger.warning(
                "%s computes all tokens of a sequence in each step, so that work grows with the "
                "square of the length: %s",
                type(model).__name__,
                layout.why_recomputed,
            )
        if layout is not None:
            self.past_key_values = Decoder(
                layout, model.config, vllm_config=vllm_config, prefix=prefix
            )
            self.past_key_values.decode = self._decode
        self._embed: Callable[..., Any] = model.get_input_embeddings().__call__
        self._attend_by: Callable[[str], None] = model.set_attn_implementation
        self._mix_by: Callable[[str], None] = model.set_experts_implementation
        self._mixes_by: str = model.config._experts_implementation
        self._convert = Conversion(model)

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        try:
            examine(vllm_config)
        except UnsupportedError as error:
            return str(error)
        return None

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        name: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
        return name

    @classmethod
    def reserved_positions(cls, vllm_config: VllmConfig) -> int:
        name = vllm_config.hf_config["architectures"][0]
        module = sys.modules.get(getattr(getattr(transformers, name, None), "__module__", ""))
        if module is not None and not any(
            hasattr(member, "create_position_ids_from_input_ids")
            for member in vars(module).values()
        ):
            return 0
        return examine(vllm_config).first_position

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
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
        if self.past_key_values is not None:
            assert inputs_embeds is None, "its decoder takes tokens"
            by_itself: Tensor = self.past_key_values(input_ids, next(self.parameters()))
            return by_itself
        # For transformers the flat batch is one sequence; only attention, which is ours, knows
        # better.
        inputs = (
            {"input_ids": input_ids[None]}
            if inputs_embeds is None
            else {"inputs_embeds": inputs_embeds[None]}
        )
        if self.first_position:
            positions = positions + self.first_position
        hidden_states: Tensor = self._decode(
            **inputs, position_ids=positions[None], use_cache=False
        )[0]
        return hidden_states[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        if self._project is None:
            return hidden_states
        logits: Tensor = self._project(inputs_embeds=hidden_states[None], use_cache=False).logits
        return logits[0]

    def plain(self, token_ids: Tensor, *, exact: bool = False) -> Tensor:
        with (
            deadline(SECONDS, f"compute {len(token_ids)} tokens"),
            self._attention_of_transformers(),
            self._exactly(exact),
        ):
            if type(self).compute_logits is not TransformersForCausalLM.compute_logits:
                # A pooling adapter has taken the head away.
                hidden_states: Tensor = self._decode(input_ids=token_ids[None], use_cache=False)[0]
                return hidden_states[0]
            logits: Tensor = self._whole(input_ids=token_ids[None], use_cache=False).logits
            return logits[0]

    def _exactly(self, exact: bool) -> AbstractContextManager[None]:
        """The context in which a forward pass computes in float32, if `exact`."""
        return self._in_float32() if exact else nullcontext()

    @contextmanager
    def _in_float32(self) -> Iterator[None]:
        """Experts are computed one by one: all of a layer in float32 may take more memory than
        there is."""
        self._mix_by("eager")
        try:
            with Exact():
                yield
        finally:
            self._mix_by(self._mixes_by)

    @contextmanager
    def _attention_of_transformers(self) -> Iterator[None]:
        if self.past_key_values is not None:
            yield
            return
        self._attend_by("eager")
        try:
            yield
        finally:
            self._attend_by(NAME)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._convert(weights))

    def _adopt(self, model: nn.Module) -> None:
        """Takes over what `model` holds, so that weights and layers have the checkpoint's names."""
        for name, child in model.named_children():
            self.add_module(name, child)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in model.named_buffers(recurse=False):
            self.register_buffer(
                name, buffer, persistent=name not in model._non_persistent_buffers_set
            )
