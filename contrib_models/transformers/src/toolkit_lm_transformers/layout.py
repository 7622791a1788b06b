"""What transformers' own cache holds of a sequence, and how a part of it is taken out and put
back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from toolkit_lm.errors import UnsupportedError
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)

from toolkit_lm_transformers.head import decoder_of

_RUNS = ((1, 3), (2, 4))
"""Sequences and tokens of the two forward passes whose caches are compared."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Entry(NamedTuple):
    """A tensor of a layer's cache."""

    layer: int
    attribute: str
    key: int | None
    """Key of the tensor, where the attribute is a dict."""
    axis: int | None
    """Axis of the tokens; None: a state, whose size is fixed."""
    shape: tuple[int, ...]
    """Shape for one sequence, without the axis of tokens."""
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Numbers of a token, or of a state."""
        return torch.Size(self.shape).numel()


class CacheLayout(NamedTuple):
    """All that a sequence keeps between the steps of a decoder that attends by its own code."""

    argument: str | None
    """Argument of its forward that takes the cache. None: it has no cache that pages can hold, and
    computes all tokens in each step. Then the tokens' ids are kept."""
    entries: tuple[Entry, ...]
    facts: tuple[Mapping[str, Any], ...]
    """By layer: the attributes of its cache beside tensors, after a forward pass."""
    width: int
    """Numbers of a token in the result."""
    whole: bool = False
    """The model computes logits: its decoder cannot be told from its head."""
    why_recomputed: str = ""
    """Why pages cannot hold its cache."""

    def entries_of(self, *, tokens: bool) -> list[Entry]:
        """Those of tokens, or the states."""
        return [entry for entry in self.entries if (entry.axis is not None) == tokens]


IDS = Entry(0, "input_ids", None, 1, (), torch.float32)
"""The ids of tokens. Float32 holds those of any vocabulary."""


@torch.no_grad()
def find_layout(model: Any, dtype: torch.dtype, whole: bool) -> CacheLayout:
    """The layout of the cache of a model in bfloat16 on the device "meta", when it computes in
    `dtype`. Raises UnsupportedError where it holds what is neither an entry of each token nor a
    state."""
    argument = cache_argument(model)
    runner = _runner(model, whole)
    results = [_cached(runner, argument, model.config, sizes) for sizes in _RUNS]
    small, large = (getattr(result, argument, None) for result in results)
    if not isinstance(small, DynamicCache) or not isinstance(large, DynamicCache):
        raise UnsupportedError(f"it keeps a cache of its own, {type(small).__name__}")
    entries: list[Entry] = []
    facts: list[Mapping[str, Any]] = []
    for index, (layer, longer) in enumerate(zip(small.layers, large.layers, strict=True)):
        tensors = dict(_tensors(layer))
        others = dict(_tensors(longer))
        for (attribute, key), tensor in tensors.items():
            entry = _entry(index, attribute, key, tensor, others[attribute, key])
            if entry.dtype is torch.bfloat16:
                entry = entry._replace(dtype=dtype)
            if entry.dtype not in _DTYPES:
                raise UnsupportedError(f"its cache holds {attribute!r} in {entry.dtype}")
            entries.append(entry)
        facts.append(_facts(layer, longer))
    if not entries:
        raise UnsupportedError("its layers keep nothing in transformers' cache")
    width = (results[0].logits if whole else results[0][0]).shape[-1]
    return CacheLayout(argument, tuple(entries), tuple(facts), width, whole)


def _cached(runner: Any, argument: str, config: Any, sizes: tuple[int, int]) -> Any:
    """Result of a forward pass with a cache. Some code reads a mask's values, which shapes lack;
    without a mask, other code reads the tokens'."""
    tokens = torch.zeros(*sizes, dtype=torch.long, device="meta")
    try:
        return runner(input_ids=tokens, use_cache=True, **{argument: new_cache(config)})
    except RuntimeError:
        return runner(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            use_cache=True,
            **{argument: new_cache(config)},
        )


def recomputing(model: Any, whole: bool, why: str) -> CacheLayout:
    """The layout of a model that computes all tokens in each step, and the reason for that. Raises
    UnsupportedError where the size of its hidden states is unknown."""
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedError("transformers does not know its head")
    width = head.weight.shape[0 if whole else 1]
    return CacheLayout(None, (IDS,), (), width, whole, why)


def _runner(model: Any, whole: bool) -> Any:
    found = decoder_of(model)
    return model if whole or found is None else found[1]


def cache_argument(model: Any) -> str:
    """Argument of a model's forward that takes a cache."""
    for name in ("past_key_values", "cache_params"):
        if name in inspect.signature(model.forward).parameters:
            return name
    raise UnsupportedError("it takes no cache of transformers")


def new_cache(config: Any) -> DynamicCache:
    """A cache in which layers with windows keep all tokens: masks apply the windows."""
    cache = DynamicCache(config=config)
    cache.layers = [_with_all_tokens(layer) for layer in cache.layers]
    return cache


def _with_all_tokens(layer: Any) -> Any:
    if isinstance(layer, LinearAttentionAndSlidingWindowAttentionLayer):
        return LinearAttentionAndFullAttentionLayer(number_of_states=layer.number_of_states)
    return DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer


def _tensors(layer: Any) -> Iterator[tuple[tuple[str, int | None], Tensor]]:
    for attribute, value in vars(layer).items():
        if isinstance(value, Tensor):
            yield (attribute, None), value
        elif isinstance(value, dict):
            for key, part in value.items():
                if isinstance(part, Tensor):
                    yield (attribute, key), part


def _entry(layer: int, attribute: str, key: int | None, small: Tensor, large: Tensor) -> Entry:
    (few, short), (many, long) = _RUNS
    place = f"{attribute!r} of layer {layer}'s cache"
    if small.ndim != large.ndim or (small.shape[0], large.shape[0]) != (few, many):
        raise UnsupportedError(f"{place} does not begin with an axis of sequences")
    grown = [axis for axis in range(1, small.ndim) if small.shape[axis] != large.shape[axis]]
    if not grown:
        return Entry(layer, attribute, key, None, tuple(small.shape[1:]), small.dtype)
    (axis, *more) = grown
    if more or (small.shape[axis], large.shape[axis]) != (short, long):
        raise UnsupportedError(f"{place} is neither of each token, nor of a fixed size")
    shape = (*small.shape[1:axis], *small.shape[axis + 1 :])
    return Entry(layer, attribute, key, axis, tuple(shape), small.dtype)


def _facts(layer: Any, longer: Any) -> dict[str, Any]:
    """Attributes of a layer beside tensors, the same for any number of tokens."""
    found = {}
    for attribute, value in vars(layer).items():
        plain = _plain(value)
        if plain != _plain(vars(longer)[attribute]):
            raise UnsupportedError(
                f"{attribute!r} of {type(layer).__name__} in its cache depends on the tokens"
            )
        found[attribute] = plain
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value


class Sequences:
    """Caches of transformers for the sequences of one step that continue from one length.

    `layout` is the model's; states and entries come and go as flat tensors.
    """

    def __init__(self, layout: CacheLayout, config: Any, device: torch.device) -> None:
        self.layout = layout
        self.config = config
        self.device = device

    def begin(self) -> DynamicCache:
        """A cache without tokens."""
        return new_cache(self.config)

    def put(
        self,
        cache: DynamicCache,
        tokens: Mapping[torch.dtype, Tensor],
        states: Mapping[torch.dtype, Tensor],
    ) -> None:
        """Fills a cache with entries [B, T, width] and states [B, width] by dtype."""
        cache.layer_class_to_replicate = None
        while len(cache.layers) < len(self.layout.facts):
            cache.layers.append(DynamicLayer())
        for layer, facts in zip(cache.layers, self.layout.facts, strict=True):
            vars(layer).update(copy.deepcopy(dict(facts)))
            if "device" in facts:
                layer.device = self.device
        for kept, by_tokens in ((tokens, True), (states, False)):
            offsets = dict.fromkeys(kept, 0)
            for entry in self.layout.entries_of(tokens=by_tokens):
                flat = kept[entry.dtype]
                part = flat[..., offsets[entry.dtype] : offsets[entry.dtype] + entry.width]
                offsets[entry.dtype] += entry.width
                self._set(cache, entry, part)

    def _set(self, cache: DynamicCache, entry: Entry, part: Tensor) -> None:
        if entry.axis is None:
            value = part.reshape(part.shape[0], *entry.shape).clone()
        else:
            value = part.reshape(*part.shape[:2], *entry.shape).movedim(1, entry.axis).contiguous()
        layer = cache.layers[entry.layer]
        if "dtype" in vars(layer) and entry.attribute in ("keys", "conv_states"):
            layer.dtype = value.dtype
        if entry.key is None:
            setattr(layer, entry.attribute, value)
        else:
            getattr(layer, entry.attribute)[entry.key] = value

    def entries_from(
        self, cache: DynamicCache, start: int, *, tokens: bool
    ) -> dict[torch.dtype, Tensor]:
        """Entries of the tokens from `start` on [B, T, width], or the states [B, width]."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for entry in self.layout.entries_of(tokens=tokens):
            found = getattr(cache.layers[entry.layer], entry.attribute)
            value: Tensor = found if entry.key is None else found[entry.key]
            if entry.axis is None:
                flat = value.reshape(value.shape[0], -1)
            else:
                flat = value.movedim(entry.axis, 1)[:, start:].flatten(2)
            parts.setdefault(entry.dtype, []).append(flat)
        return {dtype: torch.cat(flats, dim=-1) for dtype, flats in parts.items()}


def widths(entries: Sequence[Entry]) -> dict[torch.dtype, int]:
    """Numbers of all entries together, by dtype."""
    found: dict[torch.dtype, int] = {}
    for entry in entries:
        found[entry.dtype] = found.get(entry.dtype, 0) + entry.width
    return found
