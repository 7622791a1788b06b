"""Base of all families: a decoder, under the checkpoint's name for it, and the head that turns
hidden states into logits."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    Absent,
    HFConfig,
    IntermediateTensors,
    Model,
    ParallelLMHead,
    VocabParallelEmbedding,
    is_first_stage,
    is_last_stage,
    join,
    logits_of,
)
from torch import Tensor


class Decoder(Model):
    """Embedding, layers and last norm, or the slice of them that a pipeline rank owns."""

    is_tied_by_default: ClassVar[bool] = False
    """Default of `tie_word_embeddings` if config.json does not state it."""
    embedding_name: ClassVar[str] = "embed_tokens"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        parallel = vllm_config.parallel
        self.is_first = is_first_stage(parallel)
        self.is_last = is_last_stage(parallel)
        self.is_tied = config.get("tie_word_embeddings", bool, self.is_tied_by_default)
        embeds = self.is_first or (self.is_last and self.is_tied)
        self.add_module(self.embedding_name, self._embedding(config) if embeds else Absent())

    def _embedding(self, config: HFConfig) -> VocabParallelEmbedding:
        return VocabParallelEmbedding(
            config.require("vocab_size", int),
            self.embedding_size(config),
            scale=self.embedding_scale(config),
            vllm_config=self.vllm_config,
            prefix=join(self.prefix, self.embedding_name),
        )

    def embedding_size(self, config: HFConfig) -> int:
        """Length of a token's embedding, and of what the head takes."""
        return config.require("hidden_size", int)

    def embedding_scale(self, config: HFConfig) -> float:
        """Factor that embeddings are multiplied by."""
        return 1.0


class CausalLM(Model):
    """A decoder with its language-modeling head."""

    decoder_name: ClassVar[str] = "model"

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        decoder = self.make_decoder(join(prefix, self.decoder_name))
        self.add_module(self.decoder_name, decoder)
        self.lm_head = (
            self._head(HFConfig(vllm_config.hf_config), decoder) if decoder.is_last else Absent()
        )

    def make_decoder(self, prefix: str) -> Decoder:
        raise NotImplementedError

    def _head(self, config: HFConfig, decoder: Decoder) -> ParallelLMHead:
        tied = decoder.get_submodule(decoder.embedding_name) if decoder.is_tied else None
        assert tied is None or isinstance(tied, VocabParallelEmbedding)
        sizes = config.require("vocab_size", int), decoder.embedding_size(config)
        return ParallelLMHead(
            *sizes, tied_to=tied, vllm_config=self.vllm_config, prefix=join(self.prefix, "lm_head")
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        decoder = self.get_submodule(self.decoder_name)
        out: Tensor | IntermediateTensors = decoder(
            input_ids, positions, inputs_embeds=inputs_embeds, intermediate=intermediate
        )
        return out

    @logits_of("lm_head")
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits
