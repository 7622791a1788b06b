"""The drafter "eagle": a head that reads the model's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.model import is_first_stage
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepRun
from toolkit_lm_decoder.causal_lm import CausalLM
from torch import Tensor, nn

from toolkit_lm_drafters.checkpoints import on_last_stage
from toolkit_lm_drafters.eagle_files import HeadFiles, names_of, read_head
from toolkit_lm_drafters.eagle_heads import Eagle1Head, Eagle3Head, EagleHead
from toolkit_lm_drafters.model_drafter import Entries, ModelDrafter, Network, expanded
from toolkit_lm_drafters.target_embedding import load_embedding


class EagleDrafter(ModelDrafter):
    """EAGLE-1, 2 and 3. Entry i reads the embedding of token i + 1, and hidden states of token i.

    The names of the checkpoint's tensors tell which of them it is. Embedding and head are the
    model's, unless EAGLE-3's checkpoint has its own.
    """

    offset = 1

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **own: Any
    ) -> None:
        super().__init__(model, config, device, **own)
        files = read_head(self.options.model, model, config, self.plugins)
        self.names = names_of(self.options.model, config)
        self.taps = files.taps
        try:
            head = self._network(files, config, self.options).load(device, self.plugins)
            assert isinstance(head, EagleHead)
            self.network = self.head = head
            self.embedding = self.head.embed_tokens or self._targets_embedding()
        except CheckpointError as error:
            raise ConfigError(f"{self.names}: {error}") from error

    @classmethod
    def taps_of(
        cls, model: nn.Module, config: VllmConfig, *, plugins: Plugins, options: Any
    ) -> Sequence[str]:
        return read_head(options.model, model, config, plugins).taps

    @classmethod
    def network_of(
        cls, model: nn.Module, config: VllmConfig, plugins: Plugins, options: Any
    ) -> Network:
        return cls._network(read_head(options.model, model, config, plugins), config, options)

    @staticmethod
    def _network(files: HeadFiles, config: VllmConfig, options: Any) -> Network:
        checkpoint = Checkpoint(
            path=str(files.source),
            architecture=config.checkpoint.architecture if config.checkpoint else "",
            hf_config=files.hf_config,
        )
        own = on_last_stage(config).with_checkpoint(checkpoint)
        load = replace(
            own.load, load_format=files.load_format, quantization=options.quantization or "none"
        )
        kind = Eagle3Head if files.is_third else Eagle1Head
        return Network(kind, replace(own, load=load), "drafter/head")

    def _targets_embedding(self) -> nn.Module | None:
        """The target's embedding; None: the target computes it."""
        if is_first_stage(self.config.parallel):
            return None
        of = next((module for module in self.model.modules() if isinstance(module, CausalLM)), None)
        if of is None:
            raise ConfigError(
                f"{self.names}: the head reads the model's embedding, which is on another pipeline "
                f"stage, and {type(self.model).__name__} does not say what it is. Give "
                "pipeline_parallel_size=1, or a head that has an embedding."
            )
        return load_embedding(of, self.config, self.device, self.plugins)

    def states_of(self, hidden_states: Tensor, step: StepRun) -> Tensor:
        if not self.taps:
            return super().states_of(hidden_states, step)
        return torch.cat([step.tap(name) for name in self.taps], dim=-1)

    def first_hidden(self, states: Tensor) -> Tensor:
        if not self.taps:
            return states
        assert isinstance(self.head, Eagle3Head) and self.head.fc is not None
        fused: Tensor = self.head.fc(states)
        return fused

    def run(self, step: StepRun, entries: Entries, hidden: Tensor | None, head: int) -> Tensor:
        assert hidden is not None
        flat = torch.from_numpy(np.concatenate(entries.tokens).astype(np.int64)).to(self.device)
        own = self.embedding
        embeds = self.model.embed_input_ids(flat) if own is None else own(flat)
        return step.forward(
            self.head, entries.rows, entries.tokens, entries.start, embeds=embeds, hidden=hidden
        )

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        if not isinstance(self.head, Eagle3Head):
            logits: Tensor = self.model.compute_logits(hidden)
            return logits
        normed = self.head.norm(hidden)
        own = self.head.lm_head
        logits = self.model.compute_logits(normed) if own is None else own(normed)
        return expanded(logits, self.head.vocab_size, self.head.targets)
