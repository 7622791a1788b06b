"""The contract of attention backends, and what they are given for a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.attention.spec import AttentionSpec, AttentionType
from toolkit_lm.kv import KVCacheSpec, PageTensor

AttentionBias = Callable[[Tensor, Tensor], Tensor]
"""(query positions [Tq], key positions [Tk]) -> additive bias [num_heads, Tq, Tk], added to scaled
scores before the softmax."""


@runtime_checkable
class OffsetBias(Protocol):
    """An AttentionBias that depends on the offset of a key from its query alone (T5, ALiBi):
    backends need not hold one of each pair."""

    def __call__(self, q_positions: Tensor, k_positions: Tensor) -> Tensor: ...

    def by_offset(self, most: int) -> Tensor:
        """[num_heads, 2 * most + 1]: of keys from `most` before their query to `most` after it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerParams:
    """What a backend is told of the layer that it runs. Head counts are this rank's."""

    name: str
    """The layer's key in the engine, which is its name in the checkpoint."""
    attention_type: AttentionType | str
    """A text: of a type that a plugin brings."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Multiplies q·k."""
    window: int | None = None
    soft_cap: float | None = None
    bias: AttentionBias | None = None
    sinks: Tensor | None = None
    """[num_heads]: a logit per head that joins the softmax's denominator."""
    spans: bool = False
    """Tokens see what comes after them in their span, as `BatchView.spans` has it."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """One step's flat batch as one KV group sees it: R rows (sequences), T tokens, no padding.

    Row r owns the tokens query_start[r] : query_start[r + 1]; they are the last of its seq_lens[r]
    visible keys. In an encoder, the visible keys are the first seq_lens[r] of its tokens: all of
    them, or fewer.

    For cross attention the visible keys are those of the row's encoder sequence, all of them for
    each of its tokens. A step may write the keys of all encoder sequences, of some or of none: S
    encoder tokens, another number than T. Rows may share a block table.
    """

    query_start: np.ndarray
    """[R + 1] int32, on the host."""
    seq_lens: np.ndarray
    """[R] int32, on the host: keys that row r sees, this step's included (for cross attention: the
    encoder's length). 0: it is padding."""
    starts: np.ndarray
    """[R] int64, on the host: tokens of row r that were computed before this step. 0: it begins
    anew."""
    query_start_device: Tensor
    """[R + 1] int32."""
    seq_lens_device: Tensor
    """[R] int32."""
    block_table: Tensor | None
    """[R, most blocks] int32; None where nothing is cached. Entries past a row's keys are arbitrary
    valid block ids."""
    slot_mapping: Tensor | None
    """[T] int64: where each token's key and value go, block id * block_size + offset, -1 for
    padding; None where nothing is cached. For cross attention [S]: where those of the encoders'
    tokens go that this step writes, which k and v of `write_kv` have in this order.
    """
    max_query_len: int
    max_seq_len: int
    has_padding: bool = False
    """Some rows are padding: their slots are -1, nothing of theirs is stored, and what they give is
    not read."""
    is_fixed: bool = False
    """The step is part of a CUDA graph, as `GraphSupport` says. Its last rows may be padding.
    Tensors lie where they lie in each step of as many rows and tokens, tables have their full
    width, and `max_query_len` and `max_seq_len` are bounds for all these steps.
    """
    spans: np.ndarray | None = None
    """[T, 2] int32, on the host: [start, end) of each token's span, as indices in its sequence;
    [its index, its index + 1] of a token in none. Where a layer has `spans`, a token sees the keys
    before its span's end, its window's. A span may begin before the step, and ends in it. None:
    there are no spans.
    """

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])


class BatchLimits(NamedTuple):
    """The largest step of an engine."""

    num_rows: int
    num_tokens: int
    max_model_len: int
    """Most keys of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetup:
    """What a backend is made for: the layers of one KV group, or those that cache nothing."""

    layers: Sequence[AttentionSpec]
    """Of each layer, in the model's order. Empty for layers that are no attention."""
    kv_cache: KVCacheSpec | None
    """None: nothing is cached."""
    limits: BatchLimits
    device: torch.device
    options: Any = None
    """The plugin's own: an instance of its `Options`, or None where it has none."""


class GraphSupport(IntEnum):
    """The steps in which a CUDA graph may hold what a backend does: kernels are recorded once, and
    replayed in later steps.

    What a backend launches then follows from the view's shapes and bounds alone, in memory that
    `build` fills anew at the same addresses. Neither `write_kv` nor `forward` may wait for the
    device, or read what the host knows of the step.
    """

    NEVER = 0
    DECODE = 1
    """Steps of one token for each row."""
    UNIFORM = 2
    """Steps of equally many tokens for each row, too."""
    ALWAYS = 3

    @classmethod
    def of(cls, answer: GraphSupport | str) -> GraphSupport:
        """What `CacheBackend.graphs` answers, as one of these. A reason is NEVER."""
        return cls.NEVER if isinstance(answer, str) else answer


class CacheBackend(ABC):
    """How layers use the KV cache. One instance serves all layers of one KV group."""

    def __init__(self, setup: GroupSetup) -> None:
        self.setup = setup

    @classmethod
    def graphs(cls, spec: AttentionSpec | None) -> GraphSupport | str:
        """The steps in which a CUDA graph may hold such a layer; a text: why in none. Must not
        allocate.

        It is asked of layers that cache something, and that the backend does not refuse. `spec` is
        None where the layer is no attention.
        """
        return "what it launches depends on the rows of each step"

    @classmethod
    @abstractmethod
    def page_layout(cls, spec: KVCacheSpec) -> Sequence[PageTensor]:
        """The tensors in a page, one after the other: together spec.page_bytes.

        A layer's `kv_cache` are these tensors with one more axis, the first, which counts blocks.
        """

    @abstractmethod
    def build(self, batch: BatchView) -> Any:
        """This backend's metadata for one step, made once and used by every layer of the group."""


class AttentionBackend(CacheBackend):
    """Attention over the flat batch and the paged cache."""

    @classmethod
    @abstractmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        """Why this backend cannot run such a layer; None when it can. Must not allocate."""

    @abstractmethod
    def write_kv(
        self, layer: LayerParams, k: Tensor, v: Tensor, kv_cache: tuple[Tensor, ...], meta: Any
    ) -> None:
        """Stores k and v [T, num_kv_heads, head_size] at the step's slots, but for those that are
        -1. For cross attention they are [S].

        It is not called where a step writes none.
        """

    @abstractmethod
    def forward(
        self,
        layer: LayerParams,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: tuple[Tensor, ...] | None,
        meta: Any,
        out: Tensor,
    ) -> None:
        """Writes attention of q [T, num_heads, head_size] to out, of the same shape.

        With a cache, keys and values are read from it (this step's are written already; k and v are
        None where it has none, and for cross attention they are of other tokens than q); without,
        they are k and v, of the same tokens as q.
        """
