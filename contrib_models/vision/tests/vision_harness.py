"""Vision models without an engine: their encoder, and their logits at prompts with pictures, in one
flat batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import (
    Attention,
    BatchLimits,
    BatchView,
    Binding,
    ForwardContext,
    GroupSetup,
    forward_context,
)
from toolkit_lm.model import Model
from toolkit_lm.renderer import MultiModalRules
from toolkit_lm_sdpa.backend import SdpaBackend
from torch import Tensor


class Prompt(NamedTuple):
    """Tokens of text, with pictures among them."""

    token_ids: list[int]
    pictures: list[Tensor]
    """Pixels [1, channels, S, S] of each."""
    places: list[slice]
    """Positions of each picture's tokens."""
    is_picture: list[bool]
    """Whether an embedding of a picture replaces a token's own, by token."""


def prompt_of(rules: MultiModalRules, *parts: list[int] | Tensor) -> Prompt:
    """Prompt of tokens and pictures, in this order. A picture's replacement is that of the
    rules."""
    prompt = Prompt([], [], [], [])
    for part in parts:
        tokens = part
        mask = [False] * len(part)
        if isinstance(part, Tensor):
            found = rules.replacement("image", {"pixel_values": part.numpy()})
            tokens = found.token_ids
            mask = found.mask or [True] * len(found.token_ids)
            prompt.pictures.append(part)
            prompt.places.append(slice(len(prompt.token_ids), len(prompt.token_ids) + len(tokens)))
        prompt.token_ids.extend(tokens)
        prompt.is_picture.extend(mask)
    return prompt


def spans_of(prompt: Prompt) -> np.ndarray:
    """[T, 2]: of each run of a picture's tokens; of the others, themselves."""
    spans = np.stack(
        [np.arange(len(prompt.token_ids)), np.arange(len(prompt.token_ids)) + 1], axis=1
    ).astype(np.int32)
    start = None
    for i, inside in enumerate([*prompt.is_picture, False]):
        if inside and start is None:
            start = i
        if not inside and start is not None:
            spans[start:i] = start, i
            start = None
    return spans


@contextmanager
def sequences(
    model: Model, lengths: Sequence[int], spans: np.ndarray | None = None
) -> Iterator[None]:
    """A step in which all attention layers have sequences of these lengths, and nothing is
    cached."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    setup = GroupSetup(
        layers=[],
        kv_cache=None,
        limits=BatchLimits(len(lengths), sum(lengths), max(lengths)),
        device=torch.device("cpu"),
    )
    backend = SdpaBackend(setup)
    query_start = np.cumsum([0, *lengths], dtype=np.int32)
    seq_lens = np.array(lengths, np.int32)
    view = BatchView(
        query_start=query_start,
        seq_lens=seq_lens,
        starts=np.zeros(len(lengths), np.int64),
        query_start_device=torch.from_numpy(query_start),
        seq_lens_device=torch.from_numpy(seq_lens),
        block_table=None,
        slot_mapping=None,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        spans=spans,
    )
    bindings = {layer.prefix: Binding(backend, layer.params, None, 0) for layer in layers}
    assert len(bindings) == len(layers), "two attention layers have one prefix"
    with forward_context(ForwardContext(bindings, [backend.build(view)])):
        yield


@torch.inference_mode()
def encoded(model: Model, pictures: Sequence[Tensor]) -> list[Tensor]:
    """Embeddings of each picture."""
    items = [{"pixel_values": picture} for picture in pictures]
    return model.encode_items("image", items, lambda lengths: sequences(model, lengths))


@torch.inference_mode()
def logits_of_prompts(model: Model, prompts: Sequence[Prompt], *stages: Model) -> list[Tensor]:
    """Logits [Ti, V] at each token of each prompt, all computed in one step. `stages`: the further
    ones of a pipeline."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    input_ids = torch.tensor([token for prompt in prompts for token in prompt.token_ids])
    embeds = model.embed_input_ids(input_ids)
    pictures = [picture for prompt in prompts for picture in prompt.pictures]
    if pictures:
        embeds[torch.tensor([one for prompt in prompts for one in prompt.is_picture])] = torch.cat(
            encoded(model, pictures)
        )
    positions = torch.cat([torch.arange(length) for length in lengths])
    spans = np.concatenate([spans_of(prompt) for prompt in prompts])
    out = None
    for stage in (model, *stages):
        with sequences(stage, lengths, spans):
            out = stage(
                input_ids,
                positions,
                inputs_embeds=embeds if stage is model else None,
                intermediate=out,
            )
    return list((model, *stages)[-1].compute_logits(out).split(lengths))
