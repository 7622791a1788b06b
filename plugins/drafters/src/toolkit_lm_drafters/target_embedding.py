"""The target's embedding, on a pipeline stage that the target's own is not on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    HFConfig,
    Model,
    VocabParallelEmbedding,
    is_first_stage,
    join,
    load_model,
)
from toolkit_lm.plugin import Plugins
from toolkit_lm_decoder.causal_lm import CausalLM, Decoder
from torch import Tensor

from toolkit_lm_drafters.checkpoints import on_last_stage


class TargetEmbedding(Model):
    """The embedding of a checkpoint, and no other weight. A subclass says which it is."""

    decoder: ClassVar[Decoder]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.embed_tokens = VocabParallelEmbedding(
            config.require("vocab_size", int),
            self.decoder.embedding_size(config),
            scale=self.decoder.embedding_scale(config),
            vllm_config=vllm_config,
            prefix=join(prefix, "embed_tokens"),
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        own = f"{self.decoder.prefix}.{self.decoder.embedding_name}."
        return super().load_weights(
            ("embed_tokens." + name.removeprefix(own), tensor)
            for name, tensor in weights
            if name.startswith(own)
        )


def load_embedding(
    of: CausalLM, config: VllmConfig, device: torch.device, plugins: Plugins
) -> VocabParallelEmbedding | None:
    """Reads the embedding of a model's checkpoint again, if this stage of the model lacks it. None:
    the stage has it. Raises CheckpointError."""
    decoder = of.get_submodule(of.decoder_name)
    assert isinstance(decoder, Decoder)
    if decoder.is_tied or is_first_stage(config.parallel):
        return None
    kind = type("TargetEmbedding", (TargetEmbedding,), {"decoder": decoder})
    loaded = load_model(
        kind, on_last_stage(of.vllm_config), device, plugins, prefix="drafter/embedding"
    )
    assert isinstance(loaded, TargetEmbedding)
    return loaded.embed_tokens
