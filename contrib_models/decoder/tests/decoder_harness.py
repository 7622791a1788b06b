"""What the tests of decoder families share: transformers checkpoints, and a forward pass without an engine."""

import json
from pathlib import Path

import msgspec
import torch
from toolkit_lm.attention import Attention, AttentionBackend, Binding, GroupMetadata, forward_context
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import load_model


class CausalAttention(AttentionBackend):
    """Without a cache: the batch is one sequence, and each token sees those before it."""

    @classmethod
    def refuses(cls, spec):
        return None

    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        raise NotImplementedError

    def build(self, batch):
        return None

    def write_kv(self, layer, k, v, kv_cache, slot_mapping):
        raise NotImplementedError

    def forward(self, layer, q, k, v, kv_cache, meta, out):
        k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        hidden = (distance < 0) | (distance >= (layer.window or len(q)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v))


def logits_of(models, input_ids, inputs_embeds=None):
    """Logits [T, V] of one sequence; `models` are the stages of a pipeline, most often one."""
    layers = [m for model in models for m in model.modules() if isinstance(m, Attention)]
    bindings = {layer.prefix: Binding(CausalAttention(torch.device("cpu")), None, 0) for layer in layers}
    assert len(bindings) == len(layers)
    positions = torch.arange(len(input_ids))
    out = None
    with torch.inference_mode(), forward_context(bindings, [GroupMetadata(None, None)]):
        for model in models:
            out = model(input_ids, positions, inputs_embeds=inputs_embeds, intermediate=out)
        return models[-1].compute_logits(out)


def load(model_cls, folder: Path, *, rank: int = 0, **options):
    """The model of a checkpoint folder, as one rank holds it."""
    config = VllmConfig.default(json.loads((folder / "config.json").read_text()), **options).with_rank(rank)
    config = msgspec.structs.replace(config, checkpoint=msgspec.structs.replace(config.checkpoint, path=str(folder)))
    return load_model(model_cls, config, torch.device("cpu"))


def save(model, folder: Path, **kwargs) -> Path:
    """Writes a transformers model as a checkpoint. All of its parameters are random, also those that start as 0 or 1."""
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param, mean=float(param.ndim == 1), std=0.2)
    model.eval().save_pretrained(folder, **kwargs)
    return folder


def reference_logits(model, input_ids):
    """Logits [T, V] by transformers."""
    with torch.inference_mode():
        return model(input_ids[None]).logits[0]
