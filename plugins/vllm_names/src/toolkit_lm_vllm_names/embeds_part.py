"""Prompts of embeddings, on the workers: rows of tensors in place of placeholder tokens'
embeddings."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.messages import NewSequence
from toolkit_lm.model import VocabParallelEmbedding
from toolkit_lm.step import StepInputs, StepPart
from torch import Tensor, nn

from toolkit_lm_vllm_names.embeds_format import PARAM

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class EmbedsPart(StepPart):
    """The workers' half. Rows are as `get_input_embeddings()` of transformers gives them. The
    model's `forward` takes `inputs_embeds` [T, H], as in toolkit_lm.parts.ReadsMedia."""

    ranks = "first_stage"

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **arguments: Any
    ) -> None:
        """Raises UnsupportedError for a model that takes tokens alone, and one that reads media."""
        super().__init__(model, config, device, **arguments)
        name = type(model).__name__
        takes = "inputs_embeds" in inspect.signature(model.forward).parameters
        # A fallback's decoder with a state of its own takes tokens.
        if not takes or getattr(model, "past_key_values", None) is not None:
            raise UnsupportedError(
                f"enable_prompt_embeds: {name} takes tokens alone, and no embeddings in their "
                "place."
            )
        if self.model.parts:
            raise UnsupportedError(
                f"enable_prompt_embeds: {name} has a part {next(iter(self.model.parts))!r}, and "
                "takes its inputs from it. Prompts of embeddings are for models of text alone."
            )
        self._scale = _scale(model)
        self._prompts: dict[int, Tensor] = {}
        """Embeddings [n, H] of each sequence's prompt, by seq_id."""
        self._touched: list[tuple[int, int, Tensor]] = []

    def add(self, seq: NewSequence) -> None:
        """Keeps the embeddings of a sequence's prompt, in the model's dtype."""
        stated = seq.inputs.model_arguments.get(PARAM)
        if not stated:
            return
        flat = torch.frombuffer(bytearray(stated["data"]), dtype=_DTYPES[stated["dtype"]])
        dtype = getattr(torch, self.config.model.dtype)
        rows = flat.view(stated["num_tokens"], -1).to(self.device, dtype)
        self._prompts[seq.seq_id] = rows if self._scale == 1 else rows * self._scale

    def remove(self, seq_id: int) -> None:
        """Forgets a sequence."""
        self._prompts.pop(seq_id, None)

    def groups(self, inputs: StepInputs) -> None:
        """Finds the rows that this step reads. Graphs of the compiler are of steps of tokens."""
        self._touched.clear()
        for index, scheduled in enumerate(inputs.plan.scheduled if self._prompts else ()):
            prompt = self._prompts.get(scheduled.seq_id)
            if prompt is not None and scheduled.start < len(prompt):
                rows = prompt[scheduled.start : scheduled.start + scheduled.num_tokens]
                self._touched.append((int(inputs.query_start[index]), len(rows), rows))
        self.calls_modules = bool(self._touched)

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Returns `inputs_embeds` [T, H], if a row reads embeddings of its prompt."""
        if not self._touched:
            return {}
        embeds = self.model.embed_input_ids(torch.from_numpy(inputs.input_ids).to(self.device))
        for first, length, rows in self._touched:
            embeds[first : first + length] = rows.to(embeds.dtype)
        return {"inputs_embeds": embeds}


def _scale(model: nn.Module) -> float:
    """Factor of a model's embeddings that those of transformers lack. Gemma's have it."""
    if type(model).__name__.startswith("Gemma"):
        return 1.0
    scales = (m.scale for m in model.modules() if isinstance(m, VocabParallelEmbedding))
    return next(scales, 1.0)
