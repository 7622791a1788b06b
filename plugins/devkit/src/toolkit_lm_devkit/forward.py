"""A model's forward pass without an engine: over whole sequences, with attention by the formula and
no KV cache.

Layers that keep something else of a sequence, such as a recurrent state, compute with their own
backend and a cache that is new.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from toolkit_lm.attention import (
    AttentionBackend,
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchLimits,
    BatchView,
    Binding,
    CacheLayer,
    ForwardContext,
    GroupSetup,
    LayerParams,
    forward_context,
)
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheSpec, PageTensor
from toolkit_lm.model import Model, load_model, named_layers
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_poolers import PoolingMetadata, PoolingRow
from torch import Tensor


class FormulaAttention(AttentionBackend):
    """Attention by the formula, one sequence after the other. The metadata are the sequences'
    lengths."""

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        return None

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        raise NotImplementedError("FormulaAttention runs without a KV cache")

    def build(self, batch: BatchView) -> Any:
        raise NotImplementedError("FormulaAttention runs without an engine")

    def write_kv(self, call: AttentionCall) -> None:
        raise NotImplementedError("FormulaAttention runs without a KV cache")

    def forward(self, call: AttentionCall) -> None:
        assert call.k is not None and call.v is not None, (
            "FormulaAttention has the keys of its own tokens only"
        )
        layer = call.layer
        q = call.q
        out = call.out
        lengths = call.metadata
        group = layer.num_heads // layer.num_kv_heads
        k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
        if layer.attention_type is AttentionType.CROSS:
            assert len(lengths) == 1, "FormulaAttention does not know whose keys these are"
            self._attend(layer, q, k, v, out)
            return
        for rows in zip(*(torch.split(x, lengths) for x in (q, k, v, out)), strict=True):
            self._attend(layer, *rows)

    def _attend(self, layer: LayerParams, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        positions = torch.arange(len(q))
        k_positions = torch.arange(len(k))
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        if layer.bias is not None:
            scores = scores + layer.bias(positions, k_positions)
        distance = positions[:, None] - k_positions
        hidden = distance.abs() >= (layer.window or len(q) + len(k))
        if layer.attention_type is AttentionType.DECODER:
            hidden |= distance < 0
        scores = scores.masked_fill(hidden, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.float()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(k)].to(v.dtype)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v))


@functools.cache
def _installed() -> Plugins:
    """The installed plugins, loaded once for all checkpoints of a process."""
    return Plugins.load()


def checkpoint_config(folder: Path, *, rank: int = 0, **options: Any) -> VllmConfig:
    """The resolved config of a checkpoint folder, as rank `rank` has it; `options` are those of
    VllmConfig."""
    config = VllmConfig.default(
        json.loads((folder / "config.json").read_text()), **options
    ).with_rank(rank)
    assert config.checkpoint is not None
    profile = _installed().pooling_profiles.read(folder, config.hf_config, folder)
    return config.with_checkpoint(
        msgspec.structs.replace(config.checkpoint, path=str(folder), pooling_profile=profile)
    )


def load_checkpoint(
    model_class: type[Model],
    folder: Path,
    *,
    rank: int = 0,
    plugins: Plugins | None = None,
    **options: Any,
) -> Model:
    """The model of a checkpoint folder on the CPU, as rank `rank` holds it; `options` are those of
    VllmConfig.

    `plugins` load and quantize the weights; None: the installed ones.
    """
    return load_model(
        model_class,
        checkpoint_config(folder, rank=rank, **options),
        torch.device("cpu"),
        plugins or _installed(),
    )


@torch.inference_mode()
def hidden_states(
    stages: Sequence[Model], sequences: Sequence[Tensor], **inputs: Tensor
) -> list[Tensor]:
    """Hidden states [Ti, H] of each of `sequences`, token ids [Ti], in one flat batch.

    `stages` are those of a pipeline, most often one. `inputs` are further arguments of the models'
    `forward`, for the whole batch.
    """
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    out: Any = None
    for stage in stages:
        # Layers of two stages may have one name.
        with forward_context(_by_formula(stage, lengths)):
            out = stage(torch.cat(list(sequences)), positions, intermediate=out, **inputs)
    return list(out.split(lengths))


@torch.inference_mode()
def assert_embeds(model: Model) -> None:
    """Fails unless `embed_input_ids` gives what `forward` goes on with: where that takes
    `inputs_embeds`, they give the hidden states of the tokens, bit for bit."""
    tokens = torch.arange(3, 20)
    embedded = model.embed_input_ids(tokens)
    assert len(embedded) == len(tokens), f"{tuple(embedded.shape)} of {len(tokens)} tokens"
    if "inputs_embeds" in inspect.signature(model.forward).parameters:
        [expected] = hidden_states([model], [tokens])
        [ours] = hidden_states([model], [torch.zeros_like(tokens)], inputs_embeds=embedded)
        assert ours.equal(expected), "embed_input_ids gives others than forward goes on with"


def _by_formula(model: Model, lengths: Sequence[int]) -> ForwardContext:
    """Attention by the formula in all layers, over sequences of these lengths. Other layers have
    their own backend, and a new cache."""
    layers = [module for module in model.modules() if isinstance(module, CacheLayer)]
    limits = BatchLimits(len(lengths), sum(lengths), max(lengths))
    device = torch.device("cpu")
    backend = FormulaAttention(GroupSetup(layers=[], kv_cache=None, limits=limits, device=device))
    bindings: dict[str, Binding] = {}
    metadata: list[Any] = [lengths]
    for layer in layers:
        if not layer.needs_cache:
            bindings[layer.prefix] = Binding(backend, layer.params, None, 0)
            continue
        spec = layer.keeps
        asked = layer.attention_spec(device, cached=True)
        own = layer.backend(
            GroupSetup(
                layers=[] if asked is None else [asked], kv_cache=spec, limits=limits, device=device
            )
        )
        batch, num_blocks = _first_step(lengths, spec)
        pages = (
            None
            if spec is None
            else tuple(_empty(num_blocks, page) for page in layer.backend.page_layout(spec))
        )
        bindings[layer.prefix] = Binding(own, layer.params, pages, len(metadata))
        metadata.append(own.build(batch))
    assert len(bindings) == len(layers), "two layers have one prefix"
    return ForwardContext(bindings, metadata, named_layers(model))


def _empty(num_blocks: int, page: PageTensor) -> Tensor:
    return torch.zeros((num_blocks, *page.shape), dtype=getattr(torch, page.dtype))


def _first_step(lengths: Sequence[int], spec: KVCacheSpec | None) -> tuple[BatchView, int]:
    """A step that computes whole sequences, each in blocks of its own, as a KV group sees it; and
    the number of blocks."""
    query_start = np.cumsum([0, *lengths], dtype=np.int32)
    seq_lens = np.array(lengths, np.int32)
    table = slots = None
    num_blocks = 0
    if spec is not None:
        size = spec.block_size
        counts = [spec.num_blocks(length) for length in lengths]
        # Nobody has block 0, so that a layer which reads the table wrongly shows it.
        num_blocks = 1 + sum(counts)
        rows = np.zeros((len(lengths), max(counts)), np.int32)
        found: list[np.ndarray] = []
        first = 1
        for row, length, count in zip(rows, lengths, counts, strict=True):
            row[:count] = np.arange(first, first + count)
            first += count
            index = np.arange(length)
            found.append(row[index // size].astype(np.int64) * size + index % size)
        table = torch.from_numpy(rows)
        slots = torch.from_numpy(np.concatenate(found))
    batch = BatchView(
        query_start=query_start,
        seq_lens=seq_lens,
        starts=np.zeros(len(lengths), np.int64),
        query_start_device=torch.from_numpy(query_start),
        seq_lens_device=torch.from_numpy(seq_lens),
        block_table=table,
        slot_mapping=slots,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        has_padding=False,
    )
    return batch, num_blocks


@torch.inference_mode()
def encoder_decoder_logits(model: Model, encoder_ids: Tensor, decoder_ids: Tensor) -> Tensor:
    """Logits [T, V] at each token of one decoder sequence [T], for the encoder sequence [E]."""
    encode: Any = model.encode
    with forward_context(_by_formula(model, [len(encoder_ids)])):
        states = encode(encoder_ids, torch.arange(len(encoder_ids)))
    with forward_context(_by_formula(model, [len(decoder_ids)])):
        hidden = model(decoder_ids, torch.arange(len(decoder_ids)), encoder_hidden_states=states)
    return model.compute_logits(hidden)


@torch.inference_mode()
def logits_of(stages: Sequence[Model], token_ids: Tensor) -> Tensor:
    """Logits [T, V] at each token of one sequence [T]; `stages` are those of `hidden_states`."""
    return stages[-1].compute_logits(hidden_states(stages, [token_ids])[0])


@torch.inference_mode()
def pooled(stages: Sequence[Model], sequences: Sequence[Tensor], **params: Any) -> list[Tensor]:
    """Outputs of a pooling model's pooler for each of `sequences`. `params`: those of
    PoolingParams.

    Raises RequestError if the pooler refuses them."""
    rows: list[PoolingRow] = []
    start = 0
    for sequence in sequences:
        token_ids = sequence.numpy().astype(np.int32)
        tokens = slice(start, start + len(sequence))
        rows.append(
            PoolingRow(
                params=PoolingParams(**params),
                tokens=tokens,
                token_ids=token_ids,
                start=0,
                num_prompt_tokens=len(token_ids),
            )
        )
        start = tokens.stop
    pooler: Any = stages[-1].pooler
    for row in rows:
        pooler.check(row.params)
    outputs: list[Tensor] = pooler(
        torch.cat(hidden_states(stages, sequences)), PoolingMetadata(rows)
    )
    return outputs
