"""What the tests of pooling adapters share: transformers checkpoints, and a forward pass with pooling, without an engine."""

import json
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from toolkit_lm.attention import Attention, AttentionBackend, Binding, GroupMetadata, forward_context
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import load_model
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import PoolingMetadata, PoolingRow
from toolkit_lm.pooling_params import PoolingParams

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
IDS = torch.tensor([7, 3, 99, 41, 12, 7, 60])


class CausalAttention(AttentionBackend):
    """By the formula, over one sequence."""

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
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * layer.scale
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        out.copy_(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1).to(v.dtype), v))


def config_of(folder: Path, **options) -> VllmConfig:
    config = VllmConfig.default(json.loads((folder / "config.json").read_text()), **{"max_model_len": 64, **options})
    profile = Plugins.load().pooling_profiles.read(folder, config.hf_config, folder)
    return config.with_checkpoint(msgspec.structs.replace(config.checkpoint, path=str(folder), pooling_profile=profile))


def load(convert, model_class, folder: Path, *, rank: int = 0, **options):
    """The converted model of a checkpoint folder, as one rank holds it."""
    config = config_of(folder, **options).with_rank(rank)
    return load_model(convert(model_class, config), config, torch.device("cpu"))


def pooled(*stages, ids=IDS, **params):
    """What a model's pooler makes of one prompt; `stages` are those of a pipeline, most often one."""
    layers = [module for stage in stages for module in stage.modules() if isinstance(module, Attention)]
    bindings = {layer.prefix: Binding(CausalAttention(torch.device("cpu")), None, 0) for layer in layers}
    row = PoolingRow(
        params=PoolingParams(**params),
        tokens=slice(0, len(ids)),
        token_ids=ids.numpy().astype(np.int32),
        start=0,
        num_prompt_tokens=len(ids),
    )
    pooler, out = stages[-1].pooler, None
    pooler.check(row.params)
    with torch.inference_mode(), forward_context(bindings, [GroupMetadata(None, None)]):
        for stage in stages:
            out = stage(ids, torch.arange(len(ids)), intermediate=out)
        return pooler(out, PoolingMetadata([row]))[0]


def save(model, folder: Path) -> Path:
    """Writes a transformers model as a checkpoint. All of its parameters are random, also those that start as 0 or 1."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    model.eval().save_pretrained(folder)
    return folder


def save_tokenizer(folder: Path, **words: int) -> None:
    """A tokenizer of single words: those given, and "w5" for each other id."""
    vocab = {f"w{i}": i for i in range(SMALL["vocab_size"]) if i not in words.values()} | words
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
