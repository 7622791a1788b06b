"""Target of the entry module."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from toolkit_lm.messages import NewSequence
from toolkit_lm.model import IntermediateTensors
from toolkit_lm.step import StepInputs, StepPart
from toolkit_lm_decoder.llama import LlamaForCausalLM
from torch import Tensor


class AdapterPart(StepPart):
    """Remembers the adapter of each sequence. An adapter is a vector, made of its name, that is
    added to the embeddings."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self._vectors: dict[int, np.ndarray] = {}

    def add(self, seq: NewSequence) -> None:
        name = seq.inputs.model_arguments.get("adapter", {}).get("style", "")
        drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
            self.config.hf_config["hidden_size"]
        )
        self._vectors[seq.seq_id] = (
            0.2 * drawn.astype(np.float32) if name else np.zeros_like(drawn, np.float32)
        )

    def remove(self, seq_id: int) -> None:
        self._vectors.pop(seq_id, None)

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        of_rows = np.stack([self._vectors[row.seq_id] for row in inputs.plan.scheduled])
        return {
            "adapters": torch.from_numpy(np.repeat(of_rows, inputs.num_tokens, axis=0)).to(
                self.device
            )
        }


class AdapterLlamaForCausalLM(LlamaForCausalLM):
    """Llama, with a vector [T, H] added to the embeddings."""

    parts = {"adapter": AdapterPart}

    def forward(
        self, input_ids: Tensor, positions: Tensor, **arguments: Any
    ) -> Tensor | IntermediateTensors:
        embedded = self.embed_input_ids(input_ids) + arguments.pop("adapters")
        return super().forward(input_ids, positions, inputs_embeds=embedded, **arguments)
