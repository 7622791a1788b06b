"""FlashInferBackend: paged attention by FlashInfer."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchView,
    GraphSupport,
    GroupSetup,
    common_refusal,
)
from toolkit_lm_paged_attention import PagedBackend, Store, gpu_refusal, halves
from torch import Tensor

from toolkit_lm_flashinfer.pages import LayerKey, Pages, find_pages, page_ids

_OLDEST = (8, 0)
"""Compute capability of the oldest GPUs that compute bfloat16."""


class Run(NamedTuple):
    """FlashInfer wrapper that computes the layers of one LayerKey in a step."""

    wrapper: Any
    """None: no token sees a key."""
    keyless: Tensor | None
    """[N] int64: tokens that see no key, while others do; None: there are none, or nobody reads
    what they give."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """One step."""

    runs: dict[LayerKey, Run]
    store: Store | None
    """None: nothing is stored."""


class FlashInferBackend(PagedBackend):
    """Attention on NVIDIA GPUs.

    Steps of one query for each row are FlashInfer's decode, by tensor cores; others are its
    prefill. Both read the cache's pages. Where nothing is cached, each token is a page. Plans are
    made in `build`, for all layers that are alike, so that CUDA graphs may hold decodes.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    head_sizes: ClassVar[tuple[int, ...]] = (64, 128, 256)
    workspace_bytes: ClassVar[int] = 128 * 2**20
    """Size that FlashInfer recommends, for partial results of keys that several programs share."""

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if spec.device != "cuda":
            return f"no kernel for device {spec.device}, only for cuda"
        return missing() or cls.lacks(spec)

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Features that a layer needs and FlashInfer does not have. None: it has all."""
        if (reason := common_refusal(spec, cls.dtypes)) is not None:
            return reason
        if spec.head_size not in cls.head_sizes:
            return (
                f"no kernel for head_size {spec.head_size}, only for "
                f"{', '.join(map(str, cls.head_sizes))}"
            )
        if spec.type is AttentionType.ENCODER and spec.window is not None:
            return "FlashInfer's windows end at the query, and an encoder's reach beyond it"
        if asked := [name for name in ("bias", "sinks", "spans") if getattr(spec, name)]:
            return f"FlashInfer's wrappers of paged caches have no {' and no '.join(asked)}"
        return None

    @classmethod
    def graphs(cls, spec: AttentionSpec | None) -> GraphSupport:
        return GraphSupport.DECODE

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        shapes = (
            LayerKey(
                layer.type,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_size,
                layer.window,
                layer.soft_cap,
            )
            for layer in setup.layers
        )
        self._keys = list(dict.fromkeys(shapes))
        self._dtype: torch.dtype = getattr(torch, setup.layers[0].dtype)
        self._block_size = None if setup.kv_cache is None else setup.kv_cache.block_size
        self._wrappers: dict[tuple[LayerKey, str, int], Any] = {}
        self._workspace: Tensor | None = None

    def library(self) -> Any:
        """The module flashinfer."""
        import flashinfer

        return flashinfer

    def build(self, batch: BatchView) -> Metadata:
        return Metadata({key: self._plan(batch, key) for key in self._keys}, self.store(batch))

    def forward(self, call: AttentionCall) -> None:
        layer = call.layer
        out = call.out
        meta: Metadata = call.metadata
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_size, layer.window, layer.soft_cap)
        run = meta.runs[LayerKey(layer.attention_type, *shape)]
        if run.wrapper is None:
            out.zero_()
            return
        pages: Tensor | tuple[Tensor, Tensor]
        if call.kv_cache is None:
            assert call.k is not None and call.v is not None
            pages = (_alone(call.k), _alone(call.v))
        elif layer.window is None:
            pages = call.kv_cache[0]
        else:
            keys, values = halves(call.kv_cache)
            pages = (keys[: len(values)].unsqueeze(1), values.unsqueeze(1))
        # A plan knows no scale, so that layers that differ in it alone share one.
        found = run.wrapper.run(
            _side_by_side(call.q),
            pages,
            q_scale=layer.scale,
            out=out if out.is_contiguous() else None,
        )
        if found is not out:
            out.copy_(found)
        if run.keyless is not None:
            out.index_fill_(0, run.keyless, 0.0)

    def _plan(self, batch: BatchView, key: LayerKey) -> Run:
        pages = find_pages(batch, key, self._block_size)
        if not batch.is_fixed and not len(pages.row):
            return Run(None, None)
        ids = page_ids(pages, batch, self._block_size, are_keys=key.window is not None)
        indptr = torch.from_numpy(pages.indptr)
        last_page_len = torch.from_numpy(pages.last_page_len)
        shape = (key.num_heads, key.num_kv_heads, key.head_size, pages.page_size)
        options = {
            "sm_scale": 1.0,
            "logits_soft_cap": key.soft_cap,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
        }
        if batch.max_query_len == 1 and batch.num_tokens == batch.num_rows:
            # The pages begin at the window, and end at the query.
            wrapper = self._decode(key, batch.num_rows if batch.is_fixed else None)
            wrapper.plan(indptr, ids, last_page_len, *shape, **options)
        else:
            assert not batch.is_fixed, "graphs hold decodes alone"
            wrapper = self._prefill(key)
            window = -1 if key.window is None else key.window - 1
            # A copy to the device may be under way while the next step changes its host arrays.
            query_start = torch.from_numpy(batch.query_start.copy())
            is_causal = key.type is AttentionType.DECODER
            wrapper.plan(
                query_start,
                indptr,
                ids,
                last_page_len,
                *shape,
                causal=is_causal,
                window_left=window,
                **options,
            )
        return Run(wrapper, None if batch.is_fixed else _keyless(batch, pages))

    def _prefill(self, key: LayerKey) -> Any:
        place = (key, "prefill", 0)
        if place not in self._wrappers:
            self._wrappers[place] = self.library().BatchPrefillWithPagedKVCacheWrapper(
                self._shared_workspace(), "NHD"
            )
        return self._wrappers[place]

    def _decode(self, key: LayerKey, num_fixed_rows: int | None) -> Any:
        """For steps of any number of rows; or of `num_fixed_rows`, in a CUDA graph, which reads the
        wrapper's own buffers."""
        place = (key, "decode", num_fixed_rows or 0)
        if place not in self._wrappers:
            buffers: dict[str, Any] = {}
            if num_fixed_rows is not None:
                sizes = {
                    "indptr": num_fixed_rows + 1,
                    "indices": num_fixed_rows * self._most_pages(key),
                    "last_page_len": num_fixed_rows,
                }
                made = {
                    name: torch.zeros(size, dtype=torch.int32, device=self.setup.device)
                    for name, size in sizes.items()
                }
                buffers = {"use_cuda_graph": True} | {
                    f"paged_kv_{name}_buffer": buffer for name, buffer in made.items()
                }
            wrapper = self.library().BatchDecodeWithPagedKVCacheWrapper
            # Without tensor cores it knows some numbers of query heads for a KV head only.
            self._wrappers[place] = wrapper(
                self._shared_workspace(), "NHD", use_tensor_cores=True, **buffers
            )
        return self._wrappers[place]

    def _most_pages(self, key: LayerKey) -> int:
        """Largest number of pages of a row with one query."""
        if self._block_size is None:
            return 1
        most = self.setup.limits.max_model_len
        return -(-most // self._block_size) if key.window is None else min(most, key.window)

    def _shared_workspace(self) -> Tensor:
        """Memory that all layers' kernels use in turn. No layer reads the results of another."""
        if self._workspace is None:
            self._workspace = torch.zeros(
                self.workspace_bytes, dtype=torch.uint8, device=self.setup.device
            )
        return self._workspace


def missing() -> str | None:
    """Why FlashInfer cannot run here; None: it can."""
    if importlib.util.find_spec("flashinfer") is None:
        return (
            "the package flashinfer is not installed: pip install 'toolkit-lm-flashinfer[kernels]'"
        )
    return gpu_refusal("FlashInfer", _OLDEST)


def _keyless(batch: BatchView, pages: Pages) -> Tensor | None:
    tokens = np.repeat(pages.last_page_len == 0, np.diff(batch.query_start)).nonzero()[0]
    return (
        torch.from_numpy(tokens).to(batch.seq_lens_device.device, non_blocking=True)
        if len(tokens)
        else None
    )


def _alone(x: Tensor) -> Tensor:
    """Keys or values [T, num_kv_heads, head_size], each in a page of its own. Those of both must
    have the same strides."""
    return x.contiguous().unsqueeze(1)


def _side_by_side(x: Tensor) -> Tensor:
    """x [T, heads, head_size] with a head's elements side by side, which they are as a model gives
    them."""
    return x if x.stride(2) == 1 else x.contiguous()
