"""The drafter "draft_model": a smaller model with the same vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepRun
from torch import Tensor, nn

from toolkit_lm_drafters.checkpoints import draft_config
from toolkit_lm_drafters.model_drafter import Entries, ModelDrafter, Network, expanded


class DraftModelDrafter(ModelDrafter):
    """A model of its own checkpoint. Its vocabulary is the target's, or the first tokens of it.

    It rests where drafts do not pay: tokens that it has missed are computed when it is asked again.
    """

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **own: Any
    ) -> None:
        super().__init__(model, config, device, **own)
        made_of = self.network_of(model, config, self.plugins, self.options)
        small = made_of.config
        self.network = self.small = made_of.load(device, self.plugins)
        self.vocab_size = config.vocab_size or small.vocab_size or 0
        self.known_tokens = small.vocab_size or self.vocab_size

    @classmethod
    def network_of(
        cls, model: nn.Module, config: VllmConfig, plugins: Plugins, options: Any
    ) -> Network:
        if options.model is None:
            raise ConfigError(
                "drafter 'draft_model' needs the draft model: drafters.model=MODEL, a folder, a "
                "hub id, or a name that a plugin registers."
            )
        small = draft_config(
            config,
            plugins,
            model=options.model,
            dtype=options.dtype or config.model.dtype,
            quantization=options.quantization,
        )
        assert small.checkpoint is not None
        kind = plugins.models.load(small.checkpoint.architecture)
        return Network(kind, small, "drafter/model")

    def run(self, step: StepRun, entries: Entries, hidden: Tensor | None, head: int) -> Tensor:
        tokens = entries.tokens
        if self.known_tokens < self.vocab_size:
            tokens = [np.where(ids < self.known_tokens, ids, 0) for ids in tokens]
        return step.forward(self.small, entries.rows, tokens, entries.start)

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        logits = self.small.compute_logits(hidden)[:, : self.vocab_size]
        return expanded(logits, self.vocab_size)
