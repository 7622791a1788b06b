"""MambaForCausalLM."""

from __future__ import annotations

from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    HFConfig,
    Model,
    ParallelLMHead,
    RMSNorm,
    VocabParallelEmbedding,
    make_layers,
)
from torch import Tensor, nn

from toolkit_lm_mamba.mixer import MambaMixer


class MambaBlock(nn.Module):
    """x [T, H] -> x + mixer(norm(x))."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        eps = config.get("layer_norm_epsilon", float, 1e-5)
        self.norm = RMSNorm(config.require("hidden_size", int), eps=eps, vllm_config=vllm_config)
        self.mixer = MambaMixer(vllm_config=vllm_config, prefix=f"{prefix}.mixer")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixer(self.norm(x))
        return out


class MambaBackbone(nn.Module):
    """Embedding, layers and last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        eps = config.get("layer_norm_epsilon", float, 1e-5)
        vocab_size = config.require("vocab_size", int)
        self.embeddings = VocabParallelEmbedding(
            vocab_size, hidden_size, vllm_config=vllm_config, prefix=f"{prefix}.embeddings"
        )
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda name: MambaBlock(vllm_config=vllm_config, prefix=name),
            f"{prefix}.layers",
            vllm_config.parallel,
        )
        self.norm_f = RMSNorm(hidden_size, eps=eps, vllm_config=vllm_config)


class MambaForCausalLM(Model):
    """Mamba with its language-modeling head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.backbone = MambaBackbone(vllm_config=vllm_config, prefix="backbone")
        self.lm_head = ParallelLMHead(
            config.require("vocab_size", int),
            config.require("hidden_size", int),
            tied_to=self.backbone.embeddings
            if config.get("tie_word_embeddings", bool, True)
            else None,
            vllm_config=vllm_config,
            prefix="lm_head",
        )

    def forward(self, input_ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        x = self.backbone.embeddings(input_ids)
        for layer in self.backbone.layers:
            x = layer(x)
        out: Tensor = self.backbone.norm_f(x)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits
