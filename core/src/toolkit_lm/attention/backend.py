"""Contract of attention backends, and the data of a step that they are given."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from toolkit_lm.attention.spec import AttentionSpec, AttentionType
from toolkit_lm.kv import KVCacheSpec, PageTensor

AttentionBias = Callable[[Tensor, Tensor], Tensor]
"""Additive bias [num_heads, Tq, Tk] of query positions [Tq] and key positions [Tk]. It is added to
scaled scores before the softmax."""


@runtime_checkable
class OffsetBias(Protocol):
    """An AttentionBias that depends only on the offset of a key from its query (T5, ALiBi).
    Backends need not hold one number per pair."""

    def __call__(self, q_positions: Tensor, k_positions: Tensor) -> Tensor: ...

    def by_offset(self, most: int) -> Tensor:
        """Biases [num_heads, 2 * most + 1] of keys from `most` before their query to `most` after
        it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerParams:
    """Parameters of one layer for a backend. Head counts are this rank's."""

    name: str
    """Name of the layer in the checkpoint, and its key in the engine."""
    attention_type: AttentionType | str
    """A plugin's own type is a plain text."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    """Factor of the scores q·k."""
    window: int | None = None
    soft_cap: float | None = None
    bias: AttentionBias | None = None
    sinks: Tensor | None = None
    """Logit per head [num_heads] that joins the denominator of the softmax."""
    k_scale: Tensor | None = None
    """[1] float32: what keys are divided by before they are stored. None unless the cache's
    `scales` are "layer"."""
    v_scale: Tensor | None = None
    """[1] float32: what values are divided by before they are stored. None as `k_scale` is."""
    spans: bool = False
    """Tokens also see later tokens of their own span: `BatchView.spans`."""


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
    """First token of each row, and the number of tokens: [R + 1] int32, on the host."""
    seq_lens: np.ndarray
    """Number of keys that each row sees, this step's included: [R] int32, on the host. In cross
    attention: the length of the encoder sequence. 0: the row is padding."""
    starts: np.ndarray
    """Number of tokens of each row that earlier steps computed: [R] int64, on the host. 0: the
    sequence begins."""
    query_start_device: Tensor
    """`query_start` on the device."""
    seq_lens_device: Tensor
    """`seq_lens` on the device."""
    block_table: Tensor | None
    """Block ids of each row: [R, most blocks] int32. Entries past a row's keys are arbitrary valid
    ids. None: nothing is cached."""
    slot_mapping: Tensor | None
    """Slot of each token's key and value: [T] int64, block id * block_size + offset. -1: padding.
    None: nothing is cached. In cross attention [S]: the slots of the encoder tokens that this step
    writes, in the order of k and v."""
    max_query_len: int
    max_seq_len: int
    has_padding: bool = False
    """Some rows are padding. Their slots are -1, so nothing of them is stored. Their output is not
    read."""
    is_fixed: bool = False
    """The step is part of a CUDA graph: see `GraphSupport`. Its last rows may be padding. Steps of
    as many rows and tokens share the addresses of their tensors. Tables have their full width.
    `max_query_len` and `max_seq_len` are bounds for all these steps."""
    spans: np.ndarray | None = None
    """Span [start, end) of each token, as indices in its sequence: [T, 2] int32, on the host. A
    token in no span has [its index, its index + 1]. In a layer with `spans`, a token also sees
    later keys of its own span, within its window. A span ends in this step; it may have begun
    earlier. None: there are no spans."""

    @property
    def num_rows(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])


class BatchLimits(NamedTuple):
    """Size of the largest step of an engine."""

    num_rows: int
    num_tokens: int
    max_model_len: int
    """Largest number of keys of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetup:
    """Arguments of a backend's constructor: the layers of one KV group, or layers that cache
    nothing."""

    layers: Sequence[AttentionSpec]
    """Specs of the attention layers, in the model's order. Empty for layers of another kind."""
    kv_cache: KVCacheSpec | None
    """Spec of the group's cache. None: the layers cache nothing."""
    limits: BatchLimits
    device: torch.device
    options: Any = None
    """Options of the backend's plugin, an instance of its `Options`. None: it has none."""


class GraphSupport(IntEnum):
    """Steps for which CUDA graphs can record a backend's kernels, to replay them in later steps.

    The kernels that a backend launches in such a step follow from the shapes and bounds of its
    BatchView alone. `build` writes to the same addresses in each of these steps. `write_kv` and
    `forward` neither wait for the device nor read the host's data of the step.
    """

    NEVER = 0
    DECODE = 1
    """Steps with one token per row."""
    UNIFORM = 2
    """Steps with the same number of tokens in each row, too."""
    ALWAYS = 3

    @classmethod
    def of(cls, answer: GraphSupport | str) -> GraphSupport:
        """Converts an answer of `CacheBackend.graphs`. A text, which is a reason, becomes NEVER."""
        return cls.NEVER if isinstance(answer, str) else answer


class CacheBackend(ABC):
    """Base of backends: the use of the KV cache by layers. One instance serves all layers of one KV
    group."""

    batch_invariant: ClassVar[bool] = False
    """A token's result has the same bits whatever else the batch holds, and whether the tokens
    before it are computed in the same step, in earlier ones, or cached by another request."""

    def __init__(self, setup: GroupSetup) -> None:
        self.setup = setup

    @classmethod
    def graphs(cls, spec: AttentionSpec | None) -> GraphSupport | str:
        """Steps for which CUDA graphs can record such a layer, or the reason why there are none.
        Must not allocate.

        Called for layers that cache something and that the backend does not refuse. `spec` is None
        if the layer is not attention.
        """
        return "what it launches depends on the rows of each step"

    @classmethod
    @abstractmethod
    def page_layout(cls, spec: KVCacheSpec) -> Sequence[PageTensor]:
        """Tensors of a page, one after the other. Together they have spec.page_bytes.

        A layer's `kv_cache` holds them with one more axis, the first: the block id.
        """

    @abstractmethod
    def build(self, batch: BatchView) -> Any:
        """Metadata of one step. Called once per step; every layer of the group uses the result."""


class AttentionCall(Struct, frozen=True, eq=False, gc=False):
    """Arguments of `write_kv` and `forward`: the attention of one layer in one step.

    T tokens, in the order of the step's flat batch. Tensors may be views. A backend must not keep
    them.
    """

    layer: LayerParams
    q: Tensor
    """Queries [T, num_heads, head_size]."""
    k: Tensor | None
    """Keys [T, num_kv_heads, head_size]. In cross attention [S, ...]: keys of S encoder tokens.
    None: the step brings no keys."""
    v: Tensor | None
    """Values, of the same shape as `k`."""
    kv_cache: tuple[Tensor, ...] | None
    """The tensors of the backend's `page_layout`, blocks first. None: nothing is cached."""
    metadata: Any
    """Result of the backend's `build` for this step."""
    out: Tensor
    """Output [T, num_heads, head_size], to be written."""


class AttentionBackend(CacheBackend):
    """Base of attention backends, which read the flat batch and the paged cache."""

    @classmethod
    @abstractmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        """Reason why this backend cannot run such a layer. None: it can. Must not allocate."""

    @abstractmethod
    def write_kv(self, call: AttentionCall) -> None:
        """Stores `call.k` and `call.v` in `call.kv_cache`, at the step's slots. A slot of -1 stores
        nothing.

        It is called before `forward`, and only where k, v and kv_cache are there.
        """

    @abstractmethod
    def forward(self, call: AttentionCall) -> None:
        """Writes attention of `call.q` to all of `call.out`.

        With a cache, keys and values are read from it: `write_kv` has stored this step's. Without,
        they are `call.k` and `call.v`, of the same tokens as q.
        """
