"""The encoder of an encoder-decoder model, whose output the decoder's cross attention reads."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import EncoderInput, NewEncoder, StepPlan
from toolkit_lm.step import StepInputs, StepPart, StepRun


class HasEncoder(Protocol):
    """Interface of a model with an EncoderPart. Its encoder computes E tokens of encoder sequences
    in a step.

    The model's `forward` also takes `encoder_hidden_states` [E, H]: the output of `encode` in this
    step, whose keys and values cross attention stores. None: those of all sequences are cached. A
    model that reads features also has `example_input(num_tokens)`. It returns the EncoderInput of a
    warm-up, with about that many tokens.
    """

    def encode(self, input_ids: Tensor, positions: Tensor, **features: list[Tensor]) -> Tensor:
        """Hidden states [E, H] of encoder tokens `input_ids` [E] at `positions` [E] (int64), for
        all sequences that a step encodes.

        If the model's rules turn prompts into features, the list `features` has those of each
        sequence that has some, in order. Tokens that the rules leave out are 0.
        """


class EncoderPart(StepPart):
    """Computes the encoder sequences of a step before its decoder tokens. The model must satisfy
    HasEncoder."""

    asks = ("encode",)
    encodes = True
    feeds = frozenset({"sequences", "encoder_cache"})

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **arguments: Any
    ) -> None:
        """Raises UnsupportedError for a model in several pipeline stages."""
        super().__init__(model, config, device, **arguments)
        if config.parallel.pipeline_parallel_size > 1:
            raise UnsupportedError(
                "encoder-decoder models run in one pipeline stage: lower pipeline_parallel_size."
            )
        self._example = getattr(
            model, "example_input", lambda num_tokens: EncoderInput.of_tokens([0] * num_tokens)
        )
        self._hidden_states: Tensor | None = None

    def begin(self, plan: StepPlan, step: StepRun) -> None:
        self._hidden_states = None
        read = [encoder.input for encoder in plan.encoders if encoder.input is not None]
        if not read:
            return
        lengths = [entry.num_tokens for entry in read]
        positions = np.concatenate([np.arange(length) for length in lengths])
        arrays = [entry.features.to_numpy().copy() for entry in read if entry.features is not None]
        features = {"features": [self._on_device(array) for array in arrays]} if arrays else {}
        input_ids = np.concatenate(
            [np.array(entry.token_ids or [0] * entry.num_tokens, np.int64) for entry in read]
        )
        with self.model.kernels.step(plan.num_tokens), step.sequences(lengths):
            self._hidden_states = self.model.encode(
                self._on_device(input_ids), self._on_device(positions), **features
            )

    def _on_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Returns `encoder_hidden_states`, in a step that encodes."""
        if self._hidden_states is None:
            return {}
        return {"encoder_hidden_states": self._hidden_states}

    def example(self, plan: StepPlan) -> None:
        """Adds an encoder sequence for each sequence, as far as one step can compute them."""
        num_tokens = sum(row.num_tokens for row in plan.scheduled)
        read: EncoderInput = self._example(plan.scheduled[0].num_tokens)
        room = (self.config.scheduler.token_budget - num_tokens) // read.num_tokens
        first = min(seq.seq_id for seq in plan.new) - 1
        plan.encoders = [
            NewEncoder(
                encoder_id=first - index, num_tokens=read.num_tokens, block_tables=[], input=read
            )
            for index in range(max(1, min(len(plan.new), room)))
        ]
        for index, seq in enumerate(plan.new):
            seq.encoder_id = plan.encoders[index % len(plan.encoders)].encoder_id
