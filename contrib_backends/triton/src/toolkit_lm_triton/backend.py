"""TritonBackend: paged attention of all types in kernels of this distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchView,
    GraphSupport,
    GroupSetup,
    LayerParams,
    OffsetBias,
    common_refusal,
)
from toolkit_lm.kv import FullSpec
from toolkit_lm_paged_attention import OffsetTables, PagedBackend
from torch import Tensor

from toolkit_lm_triton.device import DTYPES, LAUNCH, float8_refusal, refusal
from toolkit_lm_triton.pieces import (
    COLUMNS,
    Launch,
    Metadata,
    PlanKey,
    Tile,
    decode_table,
    fill_decode_table,
    power_of_2,
    split_for,
)

_MOST_SIZE = 256
"""Largest head size: larger heads do not fit the memory of a program."""
_MOST_BIASES = 2**24
"""Most biases that are held at a time."""
_GREATEST = {"int8": 127, "float8_e4m3fn": 448}
"""Greatest code of a quantized cache, by its dtype."""
CACHES = (("int8", "token"), ("float8_e4m3fn", "token"), ("float8_e4m3fn", "layer"))
"""Dtype and `scales` of the quantized caches that are read."""
_TILE_BYTES = 2**14
"""Bytes of the keys, or values, that a program holds at a time."""


class _Bias(NamedTuple):
    """Bias of the pieces first : end of a launch."""

    first: int
    end: int
    tensor: Tensor | None
    kind: int
    """Value of BIAS in the kernel `attend`: 0 none, 1 by offset, 2 by pair of positions."""
    origin: int


class TritonBackend(PagedBackend):
    """Exact attention of all types on GPUs.

    Scores, softmax and sums are in float32. The keys of rows with few queries are shared out to
    programs, equally many to each. Nothing is padded. In an encoder, a window hides keys at a
    distance of `window` or more on both sides. CUDA graphs may hold decodes.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if (reason := refusal(spec.device, spec.dtype)) is not None:
            return reason
        if spec.head_size > _MOST_SIZE:
            return f"head_size {spec.head_size} is above {_MOST_SIZE}"
        # The dtype was checked above.
        if (reason := common_refusal(spec, DTYPES, CACHES)) is not None:
            return reason
        cache = spec.kv_cache
        if isinstance(cache, FullSpec) and cache.dtype == "float8_e4m3fn":
            return float8_refusal(spec.device)
        return None

    @classmethod
    def graphs(cls, spec: AttentionSpec | None) -> GraphSupport | str:
        if spec is None or spec.type is not AttentionType.DECODER:
            return "only layers of decoders have plans that a graph can read"
        if spec.bias and not spec.offset_bias:
            return "biases of pairs of positions are made for the keys of each step"
        if spec.spans:
            return "the host alone knows the spans of tokens"
        return GraphSupport.DECODE

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        from toolkit_lm_triton.kernels import attention

        self._kernels = attention
        self._offset_tables = OffsetTables(setup.device)
        self._split = split_for(setup.limits.max_model_len)
        self._decode_keys = list(dict.fromkeys(_decode_key(layer) for layer in setup.layers))
        self._decode_tables: dict[tuple[PlanKey, int], Tensor] = {}
        """Tables that CUDA graphs read, by plan and number of rows."""

    def build(self, batch: BatchView) -> Metadata:
        meta = Metadata(batch, self._split)
        if batch.is_fixed:
            assert batch.max_query_len == 1, "graphs hold decodes alone"
            for key in self._decode_keys:
                meta.keep(key, self._decode_part(batch, key))
        return meta

    def _decode_part(self, batch: BatchView, key: PlanKey) -> Launch:
        """The rows of a step in a CUDA graph, where those of other steps of as many rows lay. As
        many programs as the longest row needs."""
        place = key, batch.num_rows
        if place not in self._decode_tables:
            self._decode_tables[place] = decode_table(batch.num_rows, self.setup.device)
        fill_decode_table(self._decode_tables[place], batch.seq_lens_device, key.window)
        most = min(batch.max_seq_len, key.window or batch.max_seq_len)
        return Launch(
            Tile.of_decodes(key.group),
            None,
            self._decode_tables[place],
            max(-(-most // self._split), 1),
        )

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.v is not None and call.kv_cache is not None
        meta: Metadata = call.metadata
        layer = call.layer
        slots = meta.batch.slot_mapping
        assert slots is not None
        k = _side_by_side(call.k)
        v = _side_by_side(call.v)
        keys, values = call.kv_cache[0].unbind(1)
        if len(slots):
            self._kernels.store_kv[len(slots), layer.num_kv_heads](
                *(k, v, keys, values, slots),
                k_token=k.stride(0),
                k_head=k.stride(1),
                v_token=v.stride(0),
                v_head=v.stride(1),
                block=keys.stride(0),
                token=keys.stride(1),
                head=keys.stride(2),
                GREATEST=_GREATEST.get(str(keys.dtype).removeprefix("torch."), 0),
                **_scales(call),
                BLOCK_SIZE=keys.shape[1],
                SIZE=layer.head_size,
                SIZE_FILLED=power_of_2(layer.head_size),
                **LAUNCH,
            )

    def forward(self, call: AttentionCall) -> None:
        meta: Metadata = call.metadata
        out = _side_by_side(call.out)
        if call.kv_cache is None:
            assert call.k is not None and call.v is not None
            k = _side_by_side(call.k)
            v = _side_by_side(call.v)
            pages: dict[str, Any] = {
                "k_block": 0,
                "v_block": 0,
                "block_table": None,
                "table_row": 0,
                "BLOCK_SIZE": 0,
            }
            strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        else:
            k, v = call.kv_cache[0].unbind(1)
            table = meta.batch.block_table
            assert table is not None
            pages = {
                "k_block": k.stride(0),
                "v_block": v.stride(0),
                "block_table": table,
                "table_row": table.stride(0),
            }
            pages["BLOCK_SIZE"] = k.shape[1]
            strides = (k.stride(1), k.stride(2), v.stride(1), v.stride(2))
        shared = pages | dict(zip(("k_token", "k_head", "v_token", "v_head"), strides, strict=True))
        kernel_call = AttentionCall(
            call.layer, _side_by_side(call.q), k, v, call.kv_cache, meta, out
        )
        for part in meta.plan(call.layer):
            for bias in self._biases(call.layer, meta, part):
                self._attend(kernel_call, part, bias, shared)
        if out is not call.out:
            call.out.copy_(out)

    def _attend(
        self, call: AttentionCall, part: Launch, bias: _Bias, shared: dict[str, Any]
    ) -> None:
        """Launches the kernels for a part.

        The elements of a head are contiguous in the call's tensors. k and v are the cache's if
        there is one.
        """
        layer = call.layer
        meta: Metadata = call.metadata
        q = call.q
        out = call.out
        pieces = part.device_table[bias.first : bias.end]
        spans = layer.spans and meta.batch.spans is not None
        filled = power_of_2(max(layer.head_size, 16))
        kv_heads = layer.num_kv_heads
        is_shared = part.splits > 1
        shape = {
            "COLUMNS": COLUMNS,
            "GROUP": layer.num_heads // kv_heads,
            "GROUP_FILLED": part.tile.group,
            "QUERIES": part.tile.queries,
            "SIZE": layer.head_size,
            "SIZE_FILLED": filled,
            "SPLIT": meta.split if is_shared else 0,
            **LAUNCH,
        }
        shares = (len(pieces), part.splits, kv_heads, part.tile.rows)
        partial, stats = _partial(shares, filled, q.device) if is_shared else (None, None)
        self._kernels.attend[len(pieces), kv_heads, part.splits](
            *(q, call.k, call.v, out, pieces),
            sinks=layer.sinks,
            bias=bias.tensor,
            span_ends=meta.span_ends() if spans else None,
            partial=partial,
            stats=stats,
            q_token=q.stride(0),
            q_head=q.stride(1),
            out_token=out.stride(0),
            out_head=out.stride(1),
            **_scales(call),
            bias_head=0 if bias.tensor is None else bias.tensor.stride(0),
            bias_query=0 if bias.tensor is None else bias.tensor.stride(-2),
            bias_origin=bias.origin,
            scale=layer.scale,
            KEYS=min(64, max(16, _TILE_BYTES // (filled * q.element_size()))),
            CAUSAL=layer.attention_type is AttentionType.DECODER,
            SPANS=spans,
            WINDOW=layer.window or 0,
            SOFT_CAP=layer.soft_cap or 0.0,
            SINKS=layer.sinks is not None,
            BIAS=bias.kind,
            **shape,
            **shared,
        )
        if is_shared:
            self._kernels.merge[len(pieces), kv_heads](
                *(partial, stats, out, pieces, out.stride(0), out.stride(1), part.splits, kv_heads),
                **shape,
            )

    def _biases(self, layer: LayerParams, meta: Metadata, part: Launch) -> Iterator[_Bias]:
        """Biases of all pieces of the launch."""
        if layer.bias is None:
            yield _Bias(0, len(part.device_table), None, 0, 0)
            return
        if isinstance(layer.bias, OffsetBias):
            # A graph finds the table that the run before its capture made: no step of a decoder
            # needs a longer one.
            most = (
                self.setup.limits.max_model_len
                if part.table is None
                else int(part.table[:, 2:6].max())
            )
            table = self._offset_tables.find(layer.bias, most)
            yield _Bias(0, len(part.device_table), table, 1, table.shape[1] // 2)
        else:
            assert part.table is not None, "graphs hold no biases of pairs"
            device = meta.batch.seq_lens_device.device
            num_keys = max(int(part.table[:, 5].max()), 1)
            keys = torch.arange(num_keys, device=device)
            for first, end in part.chunks(max(1, _MOST_BIASES // (layer.num_heads * num_keys))):
                queries = torch.from_numpy(part.positions(first, end)).to(device, non_blocking=True)
                yield _Bias(
                    first,
                    end,
                    layer.bias(queries, keys).float().contiguous(),
                    2,
                    int(part.table[first, 7]),
                )


def _scales(call: AttentionCall) -> dict[str, Any]:
    """Arguments of the kernels for the scales of a quantized cache."""
    pages = call.kv_cache[1] if call.kv_cache is not None and len(call.kv_cache) > 1 else None
    is_stored = call.kv_cache is not None
    return {
        "scales": pages,
        "scales_block": 0 if pages is None else pages.stride(0),
        "scales_token": 0 if pages is None else pages.stride(2),
        "k_scale": call.layer.k_scale if is_stored else None,
        "v_scale": call.layer.v_scale if is_stored else None,
    }


def _decode_key(spec: AttentionSpec) -> PlanKey:
    return PlanKey(spec.type, spec.window, spec.num_heads // spec.num_kv_heads, spans=False)


def _partial(shares: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the partial sums [*shares, size] of splits, and for their maxima and sums
    [*shares, 2], float32."""
    return (
        torch.empty(*shares, size, dtype=torch.float32, device=device),
        torch.empty(*shares, 2, dtype=torch.float32, device=device),
    )


def _side_by_side(x: Tensor) -> Tensor:
    """Makes the elements of a head in x [T, heads, head_size] contiguous. Models' own tensors are
    so already."""
    return x if x.stride(2) == 1 else x.contiguous()
