"""A decoder of transformers run by its own code, sequence by sequence: what its cache holds lies in
pages of the engine's cache between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from toolkit_lm.attention import BatchView, CacheBackend, CacheLayer, current
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheSpec, PageTensor
from toolkit_lm.model import join
from torch import Tensor

from toolkit_lm_transformers.layout import CacheLayout, Entry, Sequences, widths
from toolkit_lm_transformers.spec import StatesSpec, TokensSpec

_ONE_BY_ONE = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Types whose code of transformers takes one token at a time after the first step."""


class Rows(NamedTuple):
    """The sequences of a step."""

    tokens: list[slice]
    starts: list[int]
    """Tokens that were computed before."""
    blocks: Tensor
    """Block table [R, most blocks]."""
    slots: Tensor
    """Slot of each token [T]."""
    lengths: list[int]
    """Tokens that each row sees; 0: the row is padding."""

    @property
    def live(self) -> list[int]:
        """Rows other than padding."""
        return [row for row, length in enumerate(self.lengths) if length]


class PageBackend(CacheBackend):
    """Pages of numbers, by dtype."""

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, TokensSpec | StatesSpec)
        before = (spec.block_size,) if isinstance(spec, TokensSpec) else ()
        return [PageTensor((*before, width), dtype) for dtype, width in spec.widths]

    def build(self, batch: BatchView) -> Rows:
        assert batch.block_table is not None and batch.slot_mapping is not None
        bounds = batch.query_start.tolist()
        return Rows(
            [slice(begin, end) for begin, end in pairwise(bounds)],
            batch.starts.tolist(),
            batch.block_table,
            batch.slot_mapping,
            batch.seq_lens.tolist(),
        )


class PageLayer(CacheLayer):
    """Pages of what the caches of all layers hold: entries of tokens, or states."""

    backend = PageBackend

    def __init__(self, entries: Sequence[Entry], spec: KVCacheSpec, prefix: str) -> None:
        super().__init__(prefix)
        self.dtypes = list(widths(entries))
        self.spec = spec

    def kv_cache_spec(self) -> KVCacheSpec:
        return self.spec


class Decoder(PageLayer):
    """The decoder's forward pass: ids [T] -> hidden states [T, H], by transformers alone."""

    decode: Callable[..., Any]
    """The decoder of transformers."""

    def __init__(
        self, layout: CacheLayout, hf_config: Any, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        tokens = layout.entries_of(tokens=True)
        states = layout.entries_of(tokens=False)
        cache = vllm_config.cache
        token_spec = TokensSpec(
            block_size=cache.block_size, widths=names_of(tokens), token_bytes=bytes_of(tokens)
        )
        state_spec = StatesSpec(
            block_size=vllm_config.max_model_len,
            widths=names_of(states),
            state_bytes=bytes_of(states),
            snapshots=0 if cache.enable_prefix_caching is False else cache.block_size,
        )
        name = join(prefix, "past_key_values")
        super().__init__(tokens or states, token_spec if tokens else state_spec, name)
        self.states = PageLayer(states, state_spec, f"{name}.states") if tokens and states else None
        self.layout = layout
        self.hf_config = hf_config
        self.one_by_one = hf_config.model_type in _ONE_BY_ONE

    def forward(self, input_ids: Tensor, like: Tensor) -> Tensor:
        """`like`: a tensor of the model's dtype, on its device."""
        out = like.new_empty(len(input_ids), self.layout.width)
        return self.run(input_ids, out=out)

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        (input_ids,) = inputs
        _, rows = current(self.prefix)
        out.zero_()
        alike: dict[tuple[int, int], list[int]] = {}
        for row in rows.live:
            part = rows.tokens[row]
            alike.setdefault((rows.starts[row], part.stop - part.start), []).append(row)
        for (start, _), members in alike.items():
            self._compute(input_ids, out, start, members)

    def _compute(self, input_ids: Tensor, out: Tensor, start: int, members: list[int]) -> None:
        """The rows `members`, which have as many tokens, after `start` tokens each."""
        _, rows = current(self.prefix)
        index = torch.stack(
            [torch.arange(s.start, s.stop) for s in (rows.tokens[row] for row in members)]
        ).to(input_ids.device)
        if self.layout.argument is None:
            self._recompute(input_ids, out, start, members, index)
            return
        sequences = Sequences(self.layout, self.hf_config, input_ids.device)
        cache = sequences.begin()
        holders = [holder for holder in (self, self.states) if holder is not None]
        of_tokens = [holder for holder in holders if isinstance(holder.spec, TokensSpec)]
        of_states = [holder for holder in holders if isinstance(holder.spec, StatesSpec)]
        if start:
            tokens: dict[torch.dtype, Tensor] = {}
            states: dict[torch.dtype, Tensor] = {}
            for holder in of_tokens:
                tokens = read_tokens(holder, members, start)
            for holder in of_states:
                states = _read_states(holder, members)
            sequences.put(cache, tokens, states)
        pieces = torch.split(index, 1, dim=1) if start and self.one_by_one else [index]
        for piece in pieces:
            out[piece] = self._decoded(
                input_ids[piece], use_cache=True, **{self.layout.argument: cache}
            ).to(out.dtype)
        for holder in of_tokens:
            write_tokens(holder, index, sequences.entries_from(cache, start, tokens=True))
        for holder in of_states:
            _write_states(holder, members, sequences.entries_from(cache, start, tokens=False))

    def _recompute(
        self, input_ids: Tensor, out: Tensor, start: int, members: list[int], index: Tensor
    ) -> None:
        new = input_ids[index]
        past = [read_tokens(self, members, start)[torch.float32][..., 0].long()] if start else []
        out[index] = self._decoded(torch.cat([*past, new], dim=1), use_cache=False)[:, start:].to(
            out.dtype
        )
        write_tokens(self, index, {torch.float32: new[..., None].float()})

    def _decoded(self, input_ids: Tensor, **options: Any) -> Tensor:
        """[B, T] -> [B, T, width]."""
        result = self.decode(input_ids=input_ids, **options)
        found: Tensor = result.logits if self.layout.whole else result[0]
        return found


def read_tokens(layer: PageLayer, members: list[int], start: int) -> dict[torch.dtype, Tensor]:
    binding, rows = current(layer.prefix)
    assert binding.kv_cache is not None
    count = -(-start // layer.spec.block_size)
    blocks = rows.blocks[members, :count].long()
    return {
        dtype: pages[blocks].flatten(1, 2)[:, :start]
        for dtype, pages in zip(layer.dtypes, binding.kv_cache, strict=True)
    }


def write_tokens(layer: PageLayer, index: Tensor, found: dict[torch.dtype, Tensor]) -> None:
    binding, rows = current(layer.prefix)
    assert binding.kv_cache is not None
    slots = rows.slots[index.flatten()]
    for dtype, pages in zip(layer.dtypes, binding.kv_cache, strict=True):
        size = layer.spec.block_size
        pages[slots // size, slots % size] = found[dtype].flatten(0, 1).to(pages.dtype)


def _read_states(layer: PageLayer, members: list[int]) -> dict[torch.dtype, Tensor]:
    binding, rows = current(layer.prefix)
    assert binding.kv_cache is not None
    blocks = rows.blocks[members, 0].long()
    return {
        dtype: pages[blocks] for dtype, pages in zip(layer.dtypes, binding.kv_cache, strict=True)
    }


def _write_states(layer: PageLayer, members: list[int], found: dict[torch.dtype, Tensor]) -> None:
    binding, rows = current(layer.prefix)
    assert binding.kv_cache is not None
    blocks = rows.blocks[members, 0].long()
    for dtype, pages in zip(layer.dtypes, binding.kv_cache, strict=True):
        pages[blocks] = found[dtype].to(pages.dtype)


def names_of(entries: Sequence[Entry]) -> tuple[tuple[str, int], ...]:
    return tuple(
        (str(dtype).removeprefix("torch."), width) for dtype, width in widths(entries).items()
    )


def bytes_of(entries: Sequence[Entry]) -> int:
    return sum(entry.width * entry.dtype.itemsize for entry in entries)
