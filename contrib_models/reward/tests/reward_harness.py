"""What the tests of reward models share: a forward pass with pooling over several prompts, without an engine."""

import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from toolkit_lm.attention import Attention, AttentionBackend, Binding, GroupMetadata, forward_context
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import load_model
from toolkit_lm.pooling import PoolingMetadata, PoolingRow
from toolkit_lm.pooling_params import PoolingParams

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TAG = 60
PROMPTS = [torch.tensor([7, 3, TAG, 41, 12, 7, TAG]), torch.tensor([5]), torch.tensor([TAG, 99, 98])]


class CausalAttention(AttentionBackend):
    """By the formula, one sequence after the other; the metadata are their lengths."""

    @classmethod
    def refuses(cls, spec):
        return None

    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        raise NotImplementedError

    def build(self, batch):
        raise NotImplementedError

    def write_kv(self, layer, k, v, kv_cache, slot_mapping):
        raise NotImplementedError

    def forward(self, layer, q, k, v, kv_cache, meta, out):
        k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, 1) for x in (k, v))
        for q_row, k_row, v_row, out_row in zip(q.split(meta), k.split(meta), v.split(meta), out.split(meta), strict=True):
            scores = torch.einsum("qhd,khd->hqk", q_row, k_row).float() * layer.scale
            later = torch.ones(len(q_row), len(q_row), dtype=torch.bool).triu(1)
            out_row.copy_(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype), v_row))


def load(model_class, folder: Path, **options):
    """The model of a checkpoint folder."""
    config = VllmConfig.default(json.loads((folder / "config.json").read_text()), **{"max_model_len": 64, **options})
    config = msgspec.structs.replace(config, checkpoint=msgspec.structs.replace(config.checkpoint, path=str(folder)))
    return load_model(model_class, config, torch.device("cpu"))


def rewards(model, prompts=PROMPTS, **params):
    """What the pooler makes of each prompt, all in one batch."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    bindings = {layer.prefix: Binding(CausalAttention(torch.device("cpu")), None, 0) for layer in layers}
    lengths, rows, start = [len(prompt) for prompt in prompts], [], 0
    for prompt in prompts:
        given = {"token_ids": prompt.numpy().astype(np.int32), "start": 0, "num_prompt_tokens": len(prompt)}
        row = PoolingRow(params=PoolingParams(task="token_classify", **params), tokens=slice(start, start + len(prompt)), **given)
        model.pooler.check(row.params)
        rows.append(row)
        start += len(prompt)
    positions = torch.cat([torch.arange(length) for length in lengths])
    with torch.inference_mode(), forward_context(bindings, [GroupMetadata(lengths, None)]):
        return model.pooler(model(torch.cat(prompts), positions), PoolingMetadata(rows))
