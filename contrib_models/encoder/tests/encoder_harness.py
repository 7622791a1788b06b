"""What the tests of encoders share: transformers checkpoints, and a forward pass over several sequences without an engine."""

import json
from pathlib import Path

import msgspec
import torch
from toolkit_lm.attention import Attention, AttentionBackend, AttentionType, Binding, GroupMetadata, forward_context
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import load_model
from toolkit_lm.plugin import Plugins

LENGTHS = (7, 33, 1, 21, 33)


class BidirectionalAttention(AttentionBackend):
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
        assert layer.attention_type is AttentionType.ENCODER
        for q_row, k_row, v_row, out_row in zip(q.split(meta), k.split(meta), v.split(meta), out.split(meta), strict=True):
            positions = torch.arange(len(q_row))
            scores = torch.einsum("qhd,khd->hqk", q_row, k_row).float() * layer.scale
            if layer.bias is not None:
                scores = scores + layer.bias(positions, positions)
            if layer.window is not None:
                scores = scores.masked_fill((positions - positions[:, None]).abs() >= layer.window, float("-inf"))
            out_row.copy_(torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(v.dtype), v_row))


def hidden_states(stages, sequences, token_types=None, backend=BidirectionalAttention, meta=None):
    """Hidden states of each of `sequences` [Ti], computed in one flat batch; `stages` are those of a pipeline, most often one."""
    layers = [m for stage in stages for m in stage.modules() if isinstance(m, Attention)]
    bindings = {layer.prefix: Binding(backend(torch.device("cpu")), None, 0) for layer in layers}
    assert len(bindings) == len(layers)
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    more = {} if token_types is None else {"token_type_ids": torch.cat(token_types)}
    out = None
    with torch.inference_mode(), forward_context(bindings, [GroupMetadata(meta or lengths, None)]):
        for stage in stages:
            out = stage(torch.cat(sequences), positions, intermediate=out, **more)
    return out.split(lengths)


def load(model_class, folder: Path, *, rank: int = 0, **options):
    """The model of a checkpoint folder, as one rank holds it."""
    config = VllmConfig.default(json.loads((folder / "config.json").read_text()), **{"max_model_len": 64, **options}).with_rank(rank)
    profile = Plugins.load().pooling_profiles.read(folder, config.hf_config, folder)
    config = config.with_checkpoint(msgspec.structs.replace(config.checkpoint, path=str(folder), pooling_profile=profile))
    return load_model(model_class, config, torch.device("cpu"))


def save(model, folder: Path) -> Path:
    """Writes a transformers model as a checkpoint. All of its parameters are random, also those that start as 0 or 1."""
    torch.manual_seed(0)
    for param in model.parameters():
        torch.nn.init.normal_(param, mean=float(param.ndim == 1), std=0.2)
    model.eval().save_pretrained(folder)
    return folder


def random_sequences(vocab_size: int, lengths=LENGTHS):
    """Token ids, none of them special."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, vocab_size, (length,), generator=generator) for length in lengths]
