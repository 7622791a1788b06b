"""The encoder of T5 alone, as an embedder: GTR, Sentence-T5, Instructor."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, IntermediateTensors, Model, VocabParallelEmbedding, join
from toolkit_lm_poolers import embedding_pooler
from torch import Tensor

from toolkit_lm_encdec.t5 import T5EncoderBlock, T5ForConditionalGeneration, T5Stack


class T5EncoderModel(Model):
    """Embeddings: the mean of a text's hidden states, unless the checkpoint or an option says
    otherwise."""

    packed = T5ForConditionalGeneration.packed
    renames = T5ForConditionalGeneration.renames
    # Weights of a checkpoint that has a decoder too.
    ignored: ClassVar[tuple[str, ...]] = (
        *T5ForConditionalGeneration.ignored,
        r"^decoder\.",
        r"^lm_head\.",
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        sizes = config.require("vocab_size", int), config.require("d_model", int)
        self.shared = VocabParallelEmbedding(
            *sizes, vllm_config=vllm_config, prefix=join(prefix, "shared")
        )
        num_layers = config.require("num_layers", int)
        self.encoder = T5Stack(
            T5EncoderBlock,
            num_layers,
            self.shared,
            vllm_config=vllm_config,
            prefix=join(prefix, "encoder"),
        )
        self.pooler = embedding_pooler(vllm_config, default="MEAN")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor:
        out: Tensor = self.encoder(input_ids)
        return out
