"""The drafter "mtp": heads for further tokens that the model's own checkpoint holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError
from toolkit_lm.model import HFConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepRun
from toolkit_lm_decoder.causal_lm import CausalLM
from toolkit_lm_decoder.llama import LlamaParts
from torch import Tensor, nn

from toolkit_lm_drafters.checkpoints import on_last_stage
from toolkit_lm_drafters.model_drafter import Entries, ModelDrafter, Network
from toolkit_lm_drafters.mtp_heads import LAYOUTS, MtpHead, MtpModel, find_layout
from toolkit_lm_drafters.target_embedding import load_embedding

_KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types")
_ATTENTION = "full_attention"


class MtpDrafter(ModelDrafter):
    """DeepSeek-V3, GLM-4.5 to 4.7, Qwen3-Next, Qwen3.5, MiMo. Entry i of head k reads token
    i + 1 + k, and the hidden state of entry i of the head before, of the model for the first.

    Drafts beyond the number of heads repeat the last head. Embedding and head are the model's.
    """

    offset = 1
    mtp: MtpModel
    embedding: nn.Module | None
    """The target's embedding; None: the target computes it."""

    def __init__(
        self, model: nn.Module, config: VllmConfig, device: torch.device, **own: Any
    ) -> None:
        super().__init__(model, config, device, **own)
        names = _names(config)
        of = _target(model, names)
        try:
            loaded = _network(of, names, self.plugins).load(device, self.plugins)
            self.embedding = load_embedding(of, config, self.device, self.plugins)
        except CheckpointError as error:
            raise ConfigError(f"{names}: {error}") from error
        assert isinstance(loaded, MtpModel)
        self.network = self.mtp = loaded
        self.num_heads = self.mtp.num_heads
        rotary = of.get_submodule(of.decoder_name).rotary
        for head in self.mtp.heads:
            # Not a child: the tables belong to the model.
            vars(head)["rotary"] = rotary

    @classmethod
    def network_of(
        cls, model: nn.Module, config: VllmConfig, plugins: Plugins, options: Any
    ) -> Network:
        names = _names(config)
        return _network(_target(model, names), names, plugins)

    def run(self, step: StepRun, entries: Entries, hidden: Tensor | None, head: int) -> Tensor:
        assert hidden is not None, "offset is 1"
        flat = torch.from_numpy(np.concatenate(entries.tokens).astype(np.int64)).to(self.device)
        own = self.embedding
        embeds = self.model.embed_input_ids(flat) if own is None else own(flat)
        return step.forward(
            self.mtp.heads[head],
            entries.rows,
            entries.tokens,
            entries.start,
            embeds=embeds,
            hidden=hidden,
        )

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        module = self.mtp.heads[head]
        assert isinstance(module, MtpHead)
        logits: Tensor = self.model.compute_logits(module.before_logits(hidden))
        return logits


def _names(config: VllmConfig) -> str:
    """Both sides, as errors name them."""
    return f"drafter 'mtp' and model {config.model.model!r}"


def _target(model: nn.Module, names: str) -> CausalLM:
    """The language model that the heads are of. Raises ConfigError for a model without."""
    of = next((module for module in model.modules() if isinstance(module, LlamaParts)), None)
    if not isinstance(of, CausalLM):
        raise ConfigError(
            f"{names}: the heads' layers are of the model's kind, and {type(model).__name__} "
            "does not say what its layers are. Use a model of toolkit-lm-decoder, -deepseek or "
            "-hybrid."
        )
    return of


def _network(of: CausalLM, names: str, plugins: Plugins) -> Network:
    assert isinstance(of, LlamaParts)
    checkpoint = of.vllm_config.checkpoint
    assert checkpoint is not None, "a model has a checkpoint"
    loader = plugins.loaders.make(
        of.vllm_config.load.load_format, checkpoint.source or checkpoint.path
    )
    num_layers = HFConfig(checkpoint.hf_config).require("num_hidden_layers", int)
    if (found := find_layout(loader.names(), num_layers)) is None:
        there = ", ".join(
            f"{layout.example.format(layer=num_layers)} ({layout.families})" for layout in LAYOUTS
        )
        raise ConfigError(f"{names}: the checkpoint has no MTP weights: none of {there}.")
    layout, num_heads = found
    kind = type(
        "MtpModel",
        (MtpModel,),
        {
            "layout": layout,
            "num_heads": num_heads,
            "parts_of_layer": type(of),
            "packed": of.packed,
        },
    )
    own = on_last_stage(of.vllm_config).with_checkpoint(
        replace(checkpoint, hf_config=_longer(checkpoint.hf_config, num_layers, num_heads))
    )
    return Network(kind, own, "drafter/mtp")


def _longer(hf_config: dict[str, Any], num_layers: int, num_heads: int) -> dict[str, Any]:
    """A config.json whose lists of layers go on with the heads' layers."""
    lists = {
        key: kinds[:num_layers] + [_ATTENTION if _ATTENTION in kinds else kinds[-1]] * num_heads
        for key in _KINDS_OF_LAYERS
        if (kinds := hf_config.get(key))
    }
    if (every := hf_config.get("full_attention_interval")) and "layer_types" not in lists:
        known = ["linear_attention" if (i + 1) % every else _ATTENTION for i in range(num_layers)]
        lists["layer_types"] = known + [_ATTENTION] * num_heads
    return {**hf_config, **lists}
