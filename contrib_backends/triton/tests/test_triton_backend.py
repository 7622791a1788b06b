"""The contracts, which need neither Triton nor a GPU: refusals, registration, and how a step is cut
into pieces."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import toolkit_lm_triton
import torch
from toolkit_lm.attention import AttentionSpec, AttentionType, BatchView, GraphSupport
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm.plugin import AttentionBackendRegistry, KernelsRegistry, PluginInfo
from toolkit_lm_triton.backend import CACHES, TritonBackend
from toolkit_lm_triton.fused import fits
from toolkit_lm_triton.layers import TritonKernels
from toolkit_lm_triton.pieces import (
    SPLIT,
    Metadata,
    PlanKey,
    Tile,
    decode_table,
    fill_decode_table,
    make_plan,
    power_of_2,
    split_for,
)

SPEC = AttentionSpec(
    layer="model.layers.0.self_attn.attn",
    type=AttentionType.DECODER,
    num_heads=4,
    num_kv_heads=2,
    head_size=80,
    dtype="bfloat16",
    device="cuda",
    kv_cache=FullSpec(block_size=16, num_kv_heads=2, head_size=80, dtype="bfloat16"),
)
NO_CPU = (
    "no kernel for device cpu, only for cuda; Triton's interpreter, for tests, is asked for by "
    "TRITON_INTERPRET=1"
)


@pytest.fixture
def able(monkeypatch) -> None:
    """Simulates a machine with a GPU and Triton."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("type", AttentionType)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_runs_every_type_on_a_gpu(type, dtype) -> None:
    kept = msgspec.structs.replace(SPEC.kv_cache, dtype=dtype)
    assert (
        TritonBackend.refuses(
            msgspec.structs.replace(
                SPEC, type=type, dtype=dtype, kv_cache=kept, soft_cap=30.0, sinks=True
            )
        )
        is None
    )


@pytest.mark.usefixtures("able")
def test_runs_every_feature_at_once() -> None:
    assert (
        TritonBackend.refuses(
            msgspec.structs.replace(
                SPEC, window=7, soft_cap=30.0, sinks=True, bias=True, spans=True
            )
        )
        is None
    )


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "xpu"}, "no kernel for device xpu, only for cuda"),
        ({"device": "cpu"}, NO_CPU),
        (
            {"dtype": "float8_e4m3fn"},
            "no kernel for float8_e4m3fn, only for float32, bfloat16, float16",
        ),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        ({"head_size": 512}, "head_size 512 is above 256"),
        (
            {"type": AttentionType.CROSS, "window": 7, "bias": True},
            "window and bias relate positions of one sequence, and cross attention has two",
        ),
        (
            {"type": AttentionType.ENCODER, "spans": True},
            "spans are of decoders, and this is attention of type 'encoder'",
        ),
    ],
)
def test_refusals(change, reason) -> None:
    assert TritonBackend.refuses(msgspec.structs.replace(SPEC, **change)) == reason


def test_says_what_is_missing(monkeypatch) -> None:
    config = VllmConfig.default(device="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = "the package triton is not installed: pip install 'toolkit-lm-triton[kernels]'"
    assert TritonBackend.refuses(SPEC) == TritonKernels.refuses(config) == missing
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TritonBackend.refuses(SPEC) == TritonKernels.refuses(config) == "no GPU is there"


def test_the_interpreter_refuses_what_it_gets_wrong(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_cpu = msgspec.structs.replace(SPEC, device="cpu")
    wrong = (
        "Triton's interpreter computes float32 and float16 only, and gives wrong numbers in "
        "bfloat16"
    )
    assert (
        TritonBackend.refuses(on_cpu)
        == TritonKernels.refuses(VllmConfig.default(dtype="bfloat16"))
        == wrong
    )
    kept = msgspec.structs.replace(SPEC.kv_cache, dtype="float16")
    half = msgspec.structs.replace(on_cpu, dtype="float16", kv_cache=kept)
    assert TritonBackend.refuses(half) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert TritonBackend.refuses(half) == NO_CPU


def test_a_page_holds_keys_and_values() -> None:
    assert TritonBackend.page_layout(SPEC.kv_cache) == [PageTensor((2, 16, 2, 80), "bfloat16")]
    quantized = msgspec.structs.replace(SPEC.kv_cache, dtype="int8", scales="token")
    assert TritonBackend.page_layout(quantized) == [
        PageTensor((2, 16, 2, 80), "int8"),
        PageTensor((2, 16, 2), "float32"),
    ]


@pytest.mark.usefixtures("able")
def test_float8_caches_need_a_gpu_that_has_float8(monkeypatch) -> None:
    for dtype, scales in CACHES:
        cache = msgspec.structs.replace(SPEC.kv_cache, dtype=dtype, scales=scales)
        spec = msgspec.structs.replace(SPEC, kv_cache=cache)
        for capability in ((8, 0), (8, 9), (9, 0)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
            is_refused = dtype != "int8" and capability < (8, 9)
            reason = "float8 needs a GPU of compute capability 8.9 or above"
            assert TritonBackend.refuses(spec) == (reason if is_refused else None)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("toolkit_lm_triton", "torch"),
        ("toolkit_lm_triton.backend, toolkit_lm_triton.layers", "triton"),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(module, heavy) -> None:
    code = f"import sys, {module}; sys.exit({heavy!r} in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )


def test_entry_module_registers_below_the_references() -> None:
    backends, kernels = (
        kind(owner=PluginInfo("triton")) for kind in (AttentionBackendRegistry, KernelsRegistry)
    )
    toolkit_lm_triton.toolkit_register_attention_backends(backends)
    toolkit_lm_triton.toolkit_register_kernels(kernels)
    assert [(entry.key, entry.priority) for entry in (*backends.entries(), *kernels.entries())] == [
        ("triton", -5),
        ("triton", -5),
    ]
    assert backends.load("triton") is TritonBackend
    assert kernels.load("triton") is TritonKernels


def batch_of(rows, spans=None) -> BatchView:
    queries, keys = np.array(rows).T
    starts = np.cumsum([0, *queries], dtype=np.int32)
    lengths = keys.astype(np.int32)
    return BatchView(
        query_start=starts,
        seq_lens=lengths,
        starts=lengths - queries,
        query_start_device=torch.from_numpy(starts),
        seq_lens_device=torch.from_numpy(lengths),
        block_table=None,
        slot_mapping=None,
        max_query_len=int(queries.max()),
        max_seq_len=int(keys.max()),
        spans=spans,
    )


@pytest.mark.parametrize(
    ("group", "least", "tile"),
    [(1, 16, (16, 1)), (3, 16, (4, 4)), (71, 16, (1, 128)), (8, 64, (8, 8))],
)
def test_a_program_holds_all_heads_of_a_kv_head(group, least, tile) -> None:
    assert Tile.of(group, least) == tile


@pytest.mark.parametrize("type", AttentionType)
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("spans", [False, True])
def test_pieces_hold_each_query_once_and_the_keys_that_any_of_them_sees(
    type, window, spans
) -> None:
    if (type is AttentionType.CROSS and window) or (type is not AttentionType.DECODER and spans):
        pytest.skip("there is no such attention")
    rows = (
        [(1, 90), (100, 100), (12, 70), (1, 0), (3, 31), (0, 0), (1, 1)]
        if type is not AttentionType.ENCODER
        else [(99, 80), (1, 1), (5, 5)]
    )
    row_spans = [
        np.stack([np.arange(keys) // 7 * 7, np.minimum(np.arange(keys) // 7 * 7 + 7, keys)], axis=1)
        for _, keys in rows
    ]
    brought = [
        one[len(one) - queries :] if len(one) else np.array([[0, 1]] * queries).reshape(-1, 2)
        for one, (queries, _) in zip(row_spans, rows, strict=True)
    ]
    batch = batch_of(rows, np.concatenate(brought).astype(np.int32) if spans else None)
    found = {}
    for part in make_plan(batch, PlanKey(type, window, 2, spans)):
        assert torch.equal(part.device_table, torch.from_numpy(part.table))
        assert part.table[:, 7].tolist() == [0, *part.table[:, 3].cumsum().tolist()[:-1]]
        assert len(part.positions(0, len(part.table))) == part.table[:, 3].sum()
        for row, token, position, count, first, end, origin, _ in part.table.tolist():
            queries, keys = rows[row]
            assert 0 < count <= part.tile.queries and origin == batch.query_start[row]
            seen = set()
            for index in range(count):
                query = token + index - origin
                at = query + (keys - queries if type is AttentionType.DECODER else 0)
                assert at == position + index
                span = tuple(row_spans[row][at]) if spans and keys else (0, 0)
                seen |= {key for key in range(keys) if is_seen(at, key, type, window, span)}
                found[token + index] = found.get(token + index, 0) + 1
            assert (min(seen), max(seen) + 1) == (first, end) if seen else end <= first
    assert found == dict.fromkeys(range(batch.num_tokens), 1)


@pytest.mark.parametrize("window", [None, 1, 9])
def test_decodes_in_graphs_are_cut_as_others_are(window) -> None:
    """In one table for all steps of as many rows, without the host."""
    key = PlanKey(AttentionType.DECODER, window, 2, False)
    table = decode_table(4, torch.device("cpu"))
    place = table.data_ptr()
    for lengths in ([90, 1, 7, 12], [3, 0, 0, 0], [8, 9, 10, 11]):
        batch = batch_of([(1, length) for length in lengths])
        fill_decode_table(table, batch.seq_lens_device, window)
        (part,) = make_plan(batch, key)
        assert part.tile == Tile.of_decodes(2) and table.data_ptr() == place
        assert torch.equal(table, part.device_table)


@pytest.mark.parametrize(
    ("most", "split"),
    [(1, SPLIT), (32 * SPLIT, SPLIT), (32 * SPLIT + 1, 2 * SPLIT), (131072, 4096), (100_000, 4096)],
)
def test_few_programs_share_the_keys_of_a_row(most, split) -> None:
    assert split_for(most) == split and -(-most // split) <= 32


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({}, GraphSupport.DECODE),
        ({"window": 7, "soft_cap": 30.0, "sinks": True}, GraphSupport.DECODE),
        ({"bias": True, "offset_bias": True}, GraphSupport.DECODE),
        ({"bias": True}, "biases of pairs of positions are made for the keys of each step"),
        ({"spans": True}, "the host alone knows the spans of tokens"),
        ({"type": AttentionType.CROSS}, "only layers of decoders have plans that a graph can read"),
    ],
)
def test_graphs_hold_decodes(change, answer) -> None:
    assert TritonBackend.graphs(msgspec.structs.replace(SPEC, **change)) == answer


def is_seen(
    query: int, key: int, type: AttentionType, window: int | None, span: tuple[int, int]
) -> bool:
    if type is AttentionType.CROSS:
        return True
    if type is AttentionType.DECODER and key > query:
        return span[0] <= key < span[1]
    return window is None or abs(query - key) < window


def test_few_queries_share_out_their_keys_and_many_do_not() -> None:
    parts = make_plan(
        batch_of([(1, 3 * SPLIT + 1), (8, 700), (9, 700), (1, 1)]),
        PlanKey(AttentionType.DECODER, None, 2, False),
    )
    assert [(part.splits, part.tile, part.table[:, 0].tolist()) for part in parts] == [
        (4, (8, 2), [0, 1, 3]),
        (1, (32, 2), [2]),
    ]


def test_chunks_of_pieces() -> None:
    part = make_plan(
        batch_of([(1, 9), (8, 70), (3, 9), (1, 1)]), PlanKey(AttentionType.DECODER, None, 2, False)
    )[0]
    assert list(part.chunks(4)) == [(0, 1), (1, 2), (2, 4)]
    assert part.positions(2, 4).tolist() == [6, 7, 8, 0]


def test_plans_are_made_once_for_layers_that_are_alike() -> None:
    meta = Metadata(batch_of([(1, 9)]))
    layer = TritonParams()
    assert meta.plan(layer) is meta.plan(TritonParams())
    assert meta.plan(layer) is not meta.plan(TritonParams(window=3))


class TritonParams:
    attention_type = AttentionType.DECODER
    num_heads = 4
    num_kv_heads = 2
    spans = False

    def __init__(self, window: int | None = None) -> None:
        self.window = window


def test_powers_of_2() -> None:
    assert [power_of_2(n) for n in (1, 2, 3, 16, 17, 80)] == [1, 2, 4, 16, 32, 128]


def test_layers_of_other_kinds_are_left_to_their_modules() -> None:
    there = object()
    wide = SimpleNamespace(weight=[0.0] * 48)
    params = SimpleNamespace(attention_type=AttentionType.DECODER, head_size=24)
    usual = {
        "attn": SimpleNamespace(params=params, shares_with=None),
        "head_norms": None,
        "multiplier": 1.0,
        "out_norms": None,
        "value_norm": None,
        "scalar": None,
        "gate": None,
    }
    usual |= dict.fromkeys(("input_norm", "post_norm", "gate_up", "down"), there)
    assert fits(SimpleNamespace(**usual))
    missing = [{name: None} for name in ("input_norm", "post_norm", "gate_up", "down")]
    for change in (
        *missing,
        {"multiplier": 0.5},
        {"out_norms": (there, there)},
        {"head_norms": (wide, wide)},
        {"value_norm": there},
        {"scalar": there},
        {"gate": (there, there, there)},
        {"attn": SimpleNamespace(params=params, shares_with="layers.0.attn")},
    ):
        assert not fits(SimpleNamespace(**usual | change)), change
