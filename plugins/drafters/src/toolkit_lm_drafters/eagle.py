"""The drafter "eagle": a head that reads the model's hidden states."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.model import HFConfig, Layers, load_model
from toolkit_lm.resolution import find_source, read_json
from toolkit_lm.step import StepRun
from torch import Tensor, nn

from toolkit_lm_drafters.checkpoints import on_last_stage
from toolkit_lm_drafters.eagle_heads import Eagle1Head, Eagle3Head, EagleHead
from toolkit_lm_drafters.model_drafter import Entries, ModelDrafter, expanded

_BUILT = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""Values of eagle_config, as ModelOpt writes it, that the formula of EAGLE-3 has."""


class EagleDrafter(ModelDrafter):
    """EAGLE-1, 2 and 3. Entry i reads the embedding of token i + 1, and hidden states of token i.

    The names of the checkpoint's tensors tell which of them it is: EAGLE-3 has `midlayer`, `d2t` or
    `hidden_norm`. Embedding and head are the model's, unless EAGLE-3's checkpoint has its own.
    """

    offset = 1

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **own: Any
    ) -> None:
        super().__init__(model, config, device, **own)
        head = self.options.model
        if head is None:
            raise ConfigError(
                "drafter 'eagle' needs the head: drafters.model=FOLDER, or a hub id, or a name "
                "that a plugin registers."
            )
        self.names = f"EAGLE head {head!r} and model {config.model.model!r}"
        if config.parallel.pipeline_parallel_size > 1:
            raise ConfigError(
                f"{self.names}: the head reads embeddings and hidden states of all pipeline "
                "stages. Give pipeline_parallel_size=1."
            )
        try:
            self.network = self.head = self._load(head)
        except CheckpointError as error:
            raise ConfigError(f"{self.names}: {error}") from error

    def _load(self, name: str) -> EagleHead:
        source = find_source(replace(self.config.model, model=name, revision=None), self.plugins)
        hf_config = read_json(source / "config.json")
        load_format = self.plugins.loaders.reading(source) or "safetensors"
        names = {
            tensor.removeprefix("model.")
            for tensor in self.plugins.loaders.make(load_format, source).names()
        }
        config = HFConfig(hf_config)
        if any(tensor.startswith("midlayer.") or ".hidden_norm." in tensor for tensor in names):
            kind: type[EagleHead] = Eagle3Head
            self.taps = self._taps(config, name)
        else:
            kind = Eagle1Head
        self._check(config, has_own_width=kind is Eagle3Head and bool(self.taps))
        checkpoint = Checkpoint(
            path=str(source),
            architecture=self.config.checkpoint.architecture if self.config.checkpoint else "",
            hf_config={
                **hf_config,
                **_found(names, kind is Eagle3Head),
                "num_taps": len(self.taps),
            },
        )
        own = on_last_stage(self.config).with_checkpoint(checkpoint)
        load = replace(
            own.load, load_format=load_format, quantization=self.options.quantization or "none"
        )
        model = load_model(
            kind, replace(own, load=load), self.device, self.plugins, prefix="drafter/head"
        )
        assert isinstance(model, EagleHead)
        return model

    def _taps(self, config: HFConfig, name: str) -> list[str]:
        """Names of the model's layers whose outputs the head reads."""
        details = HFConfig(config.get("eagle_config", dict, {}))
        if not details.get("use_aux_hidden_state", bool, True):
            return []
        found = {
            path: len(module)
            for path, module in self.model.named_modules()
            if isinstance(module, Layers)
        }
        if len(found) != 1:
            raise ConfigError(
                f"{self.names}: the head reads layers of one decoder, and "
                f"{type(self.model).__name__} has {len(found)}."
            )
        [(path, count)] = found.items()
        for flag, built in _BUILT.items():
            if details.values.get(flag, built) != built:
                raise ConfigError(
                    f"{self.names}: config.json states {flag} {details.values[flag]!r}, and heads "
                    f"are built with {built!r}."
                )
        key = "eagle_aux_hidden_state_layer_ids"
        # The authors' code taps what enters layers 2, N // 2 and N - 3.
        layers = details.get(key, list) or config.get(key, list) or [1, count // 2 - 1, count - 4]
        wrong = [layer for layer in layers if type(layer) is not int or not 0 <= layer < count]
        if wrong or len(set(layers)) != len(layers):
            raise ConfigError(
                f"{self.names}: the head reads the outputs of layers {layers}, and the model has "
                f"layers 0 to {count - 1}. The head's config.json states them as {key}."
            )
        return [f"{path}.{layer}" for layer in layers]

    def _check(self, config: HFConfig, *, has_own_width: bool) -> None:
        """Raises ConfigError for a head that is made for another model."""
        target = HFConfig(self.config.hf_config.get("text_config") or self.config.hf_config)
        width = config.require("hidden_size", int)
        width = config.get("target_hidden_size", int, width) if has_own_width else width
        sizes = {
            "hidden_size": (width, target.get("hidden_size", int)),
            "vocab_size": (config.require("vocab_size", int), self.config.vocab_size),
        }
        for key, (ours, theirs) in sizes.items():
            if theirs is not None and ours != theirs:
                raise ConfigError(
                    f"{self.names}: the head is for a model of {key} {ours}, and this model's is "
                    f"{theirs}."
                )

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
        own = self.head.embed_tokens
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


def _found(names: Collection[str], is_third: bool) -> dict[str, bool]:
    """Properties of a head that only the checkpoint's tensors tell."""
    return {
        "attention_bias": any(name.endswith("q_proj.bias") for name in names),
        "output_bias": any(name.endswith("o_proj.bias") for name in names),
        "mlp_bias": any(name.endswith("gate_proj.bias") for name in names),
        "fc_bias": "fc.bias" in names,
        "own_embedding": is_third and "embed_tokens.weight" in names,
        "own_lm_head": is_third and "lm_head.weight" in names,
    }
