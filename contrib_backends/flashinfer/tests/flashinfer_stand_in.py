"""A CPU stand-in for the module flashinfer.

Its wrappers have the same signatures, and follow FlashInfer's documentation in plain torch. Like
the kernels, they multiply the values of masked keys by zero, and read no key past the last of a
row. Rows without keys give NaN, since the documentation does not say what they give. In CUDA graph
mode `run` reads the buffers that `plan` fills, and nothing else of the step.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from toolkit_lm.plugin import hookimpl
from toolkit_lm_flashinfer.backend import FlashInferBackend
from torch import Tensor


class _Wrapper:
    """Base of both wrappers: the buffers of a plan, and attention."""

    def _begin(
        self,
        workspace: Tensor,
        layout: str,
        use_cuda_graph: bool,
        backend: str,
        buffers: dict[str, Tensor | None],
    ) -> None:
        assert workspace.dtype == torch.uint8 and layout == "NHD" and backend == "auto"
        assert use_cuda_graph == all(buffer is not None for buffer in buffers.values())
        self.use_cuda_graph = use_cuda_graph
        self.buffers = buffers
        self.is_planned = False

    def _fill(self, **given: Tensor) -> None:
        for name, value in given.items():
            assert value.dtype == torch.int32, name
            if not self.use_cuda_graph:
                self.buffers[name] = value.clone()
                continue
            buffer = self.buffers[name]
            if name == "indices":
                assert len(value) <= len(buffer), "the buffer of indices is too small"
                buffer[: len(value)].copy_(value)
            else:
                assert len(value) == len(buffer), (
                    f"the batch size is fixed in CUDA graph mode, and {name} has another"
                )
                buffer.copy_(value)

    def _keep(
        self,
        shape: tuple[int, int, int, int],
        causal: bool,
        window: int,
        cap: float | None,
        scale: float | None,
        dtypes,
    ) -> None:
        num_heads, num_kv_heads, head_size, page_size = shape
        assert num_heads % num_kv_heads == 0
        pages = self.buffers["indptr"].diff()
        last = self.buffers["last_page_len"]
        assert (pages >= 0).all() and last[pages > 0].ge(1).all() and last.le(page_size).all(), (
            "pages of rows are not as documented"
        )
        assert not last[pages == 0].any()
        self.shape = shape
        self.causal = causal
        self.window = window
        self.cap = cap or 0.0
        self.scale = 1 / math.sqrt(head_size) if scale is None else scale
        self.dtypes = dtypes
        self.is_planned = True

    def _attend(
        self, q: Tensor, cache: Any, query_start: list[int], out: Tensor | None, factor: float
    ) -> Tensor:
        assert self.is_planned, "plan() comes before run()"
        num_heads, num_kv_heads, head_size, page_size = self.shape
        k_cache, v_cache = cache if isinstance(cache, tuple) else cache.unbind(1)
        assert k_cache.shape == v_cache.shape and k_cache.shape[1:] == (
            page_size,
            num_kv_heads,
            head_size,
        )
        assert k_cache.stride() == v_cache.stride() and k_cache.stride(-1) == q.stride(-1) == 1
        assert q.shape == (query_start[-1], num_heads, head_size)
        assert (q.dtype, k_cache.dtype, v_cache.dtype) == self.dtypes
        # A clone is read once, and whole: so a recorder sees the same reads in each step.
        indptr = self.buffers["indptr"].clone().tolist()
        last = self.buffers["last_page_len"].clone().tolist()
        ids = self.buffers["indices"].clone()[: indptr[-1]].long()
        assert len(ids) == indptr[-1]
        keys, values = (
            x[ids].float().repeat_interleave(num_heads // num_kv_heads, 2)
            for x in (k_cache, v_cache)
        )
        queries = q.clone().float()
        found = torch.full(q.shape, math.nan)
        for row, (first, end) in enumerate(itertools.pairwise(indptr)):
            if first < end:
                tokens = slice(query_start[row], query_start[row + 1])
                count = (end - first - 1) * page_size + last[row]
                k, v = (x[first:end].flatten(0, 1)[:count] for x in (keys, values))
                found[tokens] = self._attend_row(queries[tokens], k, v, factor)
        found = found.to(q.dtype)
        if out is None:
            return found
        assert out.is_contiguous() and (out.shape, out.dtype, out.device) == (
            q.shape,
            q.dtype,
            q.device,
        )
        return out.copy_(found)

    def _attend_row(self, q: Tensor, k: Tensor, v: Tensor, factor: float) -> Tensor:
        scores = torch.einsum("qhd,khd->hqk", q, k) * (self.scale * factor)
        if self.cap > 0:
            scores = self.cap * torch.tanh(scores / self.cap)
        # The last query is at the last key.
        ahead = torch.arange(len(k))[None] - (torch.arange(len(q)) + len(k) - len(q))[:, None]
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        if self.window >= 0:
            seen &= ahead >= -self.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def _dtypes(*given: Any) -> tuple[torch.dtype, ...]:
    q, kv = (getattr(torch, one) if isinstance(one, str) else one for one in given)
    return q, kv or q, kv or q


def _unused(**given: Any) -> None:
    """Raises NotImplementedError for arguments that the stand-in does not support."""
    asked = {name: value for name, value in given.items() if value not in (None, False, 0, "NONE")}
    if asked:
        raise NotImplementedError(f"the stand-in knows no {asked}")


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        _unused(jit_args=jit_args)
        buffers = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        assert use_tensor_cores, (
            "CUDA cores have kernels for some numbers of query heads for a KV head alone"
        )

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *deprecated_positional_args,
        **kwargs,
    ):
        assert not deprecated_positional_args
        self._plan_impl(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            **kwargs,
        )

    def _plan_impl(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
        is_causal=None,
    ):
        _unused(
            pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            o_data_type=o_data_type,
        )
        _unused(
            window_right=window_right,
            data_type=data_type,
            block_tables=block_tables,
            seq_lens=seq_lens,
            is_causal=is_causal,
        )
        _unused(
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            q_len_per_req=q_len_per_req - 1,
        )
        self._fill(indptr=indptr, indices=indices, last_page_len=last_page_len)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._keep(
            shape, False, window_left, logits_soft_cap, sm_scale, _dtypes(q_data_type, kv_data_type)
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert not args
        _unused(
            k_scale=k_scale,
            v_scale=v_scale,
            lse=lse,
            return_lse=return_lse,
            enable_pdl=enable_pdl,
            window_left=window_left,
        )
        _unused(
            sinks=sinks,
            q_len_per_req=q_len_per_req,
            skip=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )
        query_start = list(range(len(self.buffers["last_page_len"]) + 1))
        return self._attend(
            q, paged_kv_cache, query_start, out, 1.0 if q_scale is None else q_scale
        )


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
        variant_owns_mask=False,
    ):
        _unused(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        _unused(jit_args=jit_args, jit_kwargs=jit_kwargs, variant_owns_mask=variant_owns_mask)
        buffers = {
            "queries": qo_indptr_buf,
            "indptr": paged_kv_indptr_buf,
            "indices": paged_kv_indices_buf,
            "last_page_len": paged_kv_last_page_len_buf,
        }
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        non_blocking=True,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
        seq_lens=None,
        seq_lens_q=None,
        block_tables=None,
        max_token_per_sequence=None,
        max_sequence_kv=None,
        fixed_split_size=None,
        disable_split_kv=False,
        uniform_q_len=None,
    ):
        _unused(
            head_dim_vo=head_dim_vo,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            o_data_type=o_data_type,
        )
        _unused(
            pos_encoding_mode=pos_encoding_mode,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            fp16=use_fp16_qk_reduction,
        )
        _unused(
            prefix_len_ptr=prefix_len_ptr,
            ptr=token_pos_in_items_ptr,
            items_len=token_pos_in_items_len,
            item_len=max_item_len_ptr,
        )
        _unused(
            seq_lens=seq_lens,
            seq_lens_q=seq_lens_q,
            block_tables=block_tables,
            most=max_token_per_sequence,
            kv=max_sequence_kv,
        )
        _unused(
            fixed_split_size=fixed_split_size,
            disable_split_kv=disable_split_kv,
            uniform_q_len=uniform_q_len,
        )
        assert (len(qo_indptr), int(qo_indptr[0])) == (len(paged_kv_indptr), 0)
        given = {
            "queries": qo_indptr,
            "indptr": paged_kv_indptr,
            "indices": paged_kv_indices,
            "last_page_len": paged_kv_last_page_len,
        }
        self._fill(**given)
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._keep(
            shape,
            causal,
            window_left,
            logits_soft_cap,
            sm_scale,
            _dtypes(q_data_type, kv_data_type),
        )

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        lse_base="log2",
        lse_layout="NH",
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
        skip_softmax_threshold_scale_factor=None,
        use_fp16_softmax=None,
        uses_spcompress=None,
    ):
        assert not args and (lse_base, lse_layout) == ("log2", "NH")
        _unused(
            k_scale=k_scale,
            v_scale=v_scale,
            lse=lse,
            return_lse=return_lse,
            enable_pdl=enable_pdl,
            window_left=window_left,
        )
        _unused(sinks=sinks, skip=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf)
        _unused(use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress)
        return self._attend(
            q,
            paged_kv_cache,
            self.buffers["queries"].tolist(),
            out,
            1.0 if q_scale is None else q_scale,
        )


class StandInBackend(FlashInferBackend):
    """The backend as it would be with FlashInfer, on a CPU."""

    dtypes = ("float32", "bfloat16", "float16")
    head_sizes = (16, 64, 128, 256)
    workspace_bytes = 64

    @classmethod
    def refuses(cls, spec):
        return "the stand-in is for a CPU" if spec.device != "cpu" else cls.lacks(spec)

    def library(self):
        import flashinfer_stand_in

        return flashinfer_stand_in


class StandIn:
    """The plugin that registers it."""

    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        backends.add("stand_in", "flashinfer_stand_in:StandInBackend", priority=-1)
