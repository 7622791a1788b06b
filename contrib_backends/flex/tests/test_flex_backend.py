"""The backend's contract: refusals, options, groups, registration; and what only it must do."""

import functools
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import toolkit_lm_flex
import torch
from toolkit_lm.attention import AttentionSpec, AttentionType, BatchLimits, GroupSetup
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo
from toolkit_lm_devkit import AttentionStep
from toolkit_lm_devkit.attention_step import OffsetTable
from toolkit_lm_flex import backend, kernel
from toolkit_lm_flex.backend import FlexBackend
from toolkit_lm_flex.plan import LayerKey, QueryChunk, _pieces, _similar
from torch.nn.attention.flex_attention import flex_attention

SPEC = AttentionSpec(
    layer="model.layers.0.self_attn.attn",
    type=AttentionType.DECODER,
    num_heads=4,
    num_kv_heads=2,
    head_size=80,
    dtype="bfloat16",
    device="cpu",
    kv_cache=FullSpec(block_size=16, num_kv_heads=2, head_size=80, dtype="bfloat16"),
)
MIXED = [(1, 90), (40, 40), (12, 70), (1, 1), (30, 31), (1, 17)]


def make_step(rows=MIXED, **fields) -> AttentionStep:
    return AttentionStep(FlexBackend, rows, **fields)


def made(device: str) -> FlexBackend:
    limits = BatchLimits(num_rows=8, num_tokens=64, max_model_len=128)
    return FlexBackend(
        GroupSetup(
            layers=[SPEC], kv_cache=SPEC.kv_cache, limits=limits, device=torch.device(device)
        )
    )


@pytest.mark.parametrize("type", AttentionType)
def test_runs_every_type_on_a_cpu(type) -> None:
    assert FlexBackend.refuses(msgspec.structs.replace(SPEC, type=type)) is None


def test_runs_every_feature_at_once() -> None:
    assert (
        FlexBackend.refuses(
            msgspec.structs.replace(SPEC, window=7, soft_cap=30.0, sinks=True, bias=True)
        )
        is None
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "xpu"}, "no kernel for device xpu, only for cpu, cuda"),
        (
            {"dtype": "float8_e4m3fn"},
            "no kernel for float8_e4m3fn, only for float32, bfloat16, float16",
        ),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        (
            {"type": AttentionType.CROSS, "window": 7, "bias": True},
            "window and bias relate positions of one sequence, and cross attention has two",
        ),
    ],
)
def test_refusals(change, reason) -> None:
    assert FlexBackend.refuses(msgspec.structs.replace(SPEC, **change)) == reason


def test_a_page_holds_keys_and_values() -> None:
    assert FlexBackend.page_layout(SPEC.kv_cache) == [PageTensor((2, 16, 2, 80), "bfloat16")]


def test_is_compiled_on_a_gpu_where_triton_is(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert [made("cpu").fuses, made("cuda").fuses] == [False, True]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not made("cuda").fuses


def test_pieces_hold_each_query_once_and_only_keys_that_are_seen() -> None:
    for key in (
        LayerKey(AttentionType.DECODER, 9, 4, 16, 1000),
        LayerKey(AttentionType.DECODER, None, 4, 16, 1000),
    ):
        pieces = list(_pieces(key, 3, 100, 40, 70))
        assert len(pieces) > 1
        assert [t for p in pieces for t in range(p.token, p.token + p.num_queries)] == list(
            range(100, 140)
        )
        for piece in pieces:
            assert piece.position - piece.token == 30 - 100
            assert piece.first_key == (0 if key.window is None else max(0, piece.position - 8))
            assert piece.first_key + piece.num_keys == piece.position + piece.num_queries
            assert 4 * piece.num_queries * piece.num_keys <= 1000


@pytest.mark.parametrize("seed", range(5))
def test_groups_hold_each_piece_once_and_waste_at_most_half(seed) -> None:
    random = np.random.default_rng(seed)
    pieces = [
        QueryChunk(i, 0, 0, int(random.integers(1, 9)), 0, int(random.integers(1, 500)))
        for i in range(60)
    ]
    parts = list(_similar(pieces, 5000))
    assert sorted(p.row for part in parts for p in part) == list(range(60))
    for part in parts:
        padded = len(part) * max(p.num_queries for p in part) * max(p.num_keys for p in part)
        assert padded <= 2 * sum(p.num_queries * p.num_keys for p in part)
        assert len(part) == 1 or padded <= 5000


@pytest.mark.parametrize(
    "fields",
    [{}, {"window": 8}, {"bias": "alibi"}, {"bias": "offsets"}, {"sinks": True}, {"soft_cap": 2.0}],
    ids=str,
)
@pytest.mark.parametrize("type", [AttentionType.DECODER, AttentionType.CROSS])
def test_long_rows_are_computed_in_parts(monkeypatch, type, fields) -> None:
    if type is AttentionType.CROSS and not fields.keys().isdisjoint(("window", "bias")):
        pytest.skip("cross attention has neither windows nor biases")
    step = make_step(type=type, **fields)
    whole = step.run()
    monkeypatch.setattr(backend, "_WRITTEN_SCORES", 700)
    assert (step.run() - whole).abs().max() <= 1e-6


def test_a_row_without_keys_gives_zeros() -> None:
    step = make_step([(1, 0), (3, 5), (2, 0), (1, 9)], type=AttentionType.CROSS)
    out = step.run()
    assert not out[0].any() and not out[4:6].any()
    assert np.abs(out.numpy() - step.naive()).max() <= 1e-5


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    step = make_step(
        [(32, 4), (9, 1)], type=AttentionType.ENCODER, cached=False, window=3, sinks=True
    )
    out = step.run()
    assert not out[6:32].any()
    assert np.abs(out.numpy() - step.naive()).max() <= 1e-5


def test_large_scores_do_not_overflow() -> None:
    step = make_step(sinks=True)
    step.layer.params = replace(step.layer.params, scale=1e4)
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-4


@pytest.mark.parametrize("type", [AttentionType.DECODER, AttentionType.ENCODER])
def test_a_bias_by_offset_is_not_written_out(monkeypatch, type) -> None:
    step = make_step([(7, 7), (40, 40), (1, 1)], type=type, cached=False, bias="offsets")
    monkeypatch.setattr(
        OffsetTable, "__call__", lambda *positions: pytest.fail("it is written out")
    )
    assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5


def test_scores_that_are_not_written_may_be_many(monkeypatch) -> None:
    biases = [None, OffsetTable(4), lambda queries, keys: None]
    assert [made("cpu").writes_scores(bias) for bias in biases] == [True, True, True]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert [made("cuda").writes_scores(bias) for bias in biases] == [False, False, True]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window": 8, "sinks": True},
        {"soft_cap": 2.0},
        {"bias": "table"},
        {"bias": "offsets"},
        {"type": AttentionType.CROSS},
    ],
    ids=str,
)
def test_the_arguments_of_the_kernel(monkeypatch, fields) -> None:
    """Not compiled, it needs no GPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(kernel, "_compiled", lambda: flex_attention)
    monkeypatch.setattr(
        FlexBackend, "fuses", property(lambda self: True, lambda self, value: None), raising=False
    )
    monkeypatch.setattr(backend, "formula", None)
    step = make_step([(1, 90), (140, 140), (12, 70), (1, 1)], **fields)
    with torch.inference_mode():
        found = step.run()
    assert np.abs(found.numpy() - step.naive()).max() <= 1e-5


@pytest.fixture
def compiled_quickly(monkeypatch):
    """Has torch.compile run traced code as it was traced. It needs no GPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    kernel._compiled.cache_clear()
    yield
    kernel._compiled.cache_clear()


@pytest.mark.usefixtures("compiled_quickly")
def test_kernels_may_be_many_and_no_step_goes_without(monkeypatch) -> None:
    """torch's own limit on those of a function, here 1, does not count; past ours it is an error,
    and not attention without a kernel."""
    monkeypatch.setattr(
        FlexBackend, "fuses", property(lambda self: True, lambda self, value: None), raising=False
    )
    steps = [make_step(rows, soft_cap=2.0) for rows in ([(1, 20), (1, 30)], [(1, 40)], [(30, 40)])]
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=1):
        for step in steps:
            assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5
        monkeypatch.setattr(kernel, "_MOST_KERNELS", 2)
        monkeypatch.setattr(kernel, "_many_kernels", kernel._many_kernels.__wrapped__)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            [step.run() for step in steps]


@pytest.mark.parametrize(
    "rows", [[(1, 20), (1, 30)], [(47, 47), (40, 40)]], ids=["decode", "prefill"]
)
def test_what_a_kernel_for_gpus_is_given(monkeypatch, rows) -> None:
    """Its functions read tensors alone: torch's templates refuse symbols other than sizes, and
    floats, which are tensors of the CPU. Few queries have a kernel of their own, which holds but
    128 that share a KV head."""
    given = []

    def record(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.higher_order.flex_attention:
                read = [one.meta["example_value"] for one in (*node.args[7], *node.args[8])]
                given.append((read, node.args[6]["FORCE_USE_FLEX_ATTENTION"]))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=record)
    monkeypatch.setattr(kernel, "_compiled", lambda: compiled)
    monkeypatch.setattr(
        FlexBackend, "fuses", property(lambda self: True, lambda self, value: None), raising=False
    )
    step = make_step(rows, soft_cap=2.0, window=9)
    with torch.inference_mode():
        assert np.abs(step.run().numpy() - step.naive()).max() <= 1e-5
    [(read, is_forced)] = given
    assert is_forced is (rows[0][0] > 1)
    tensors = [one for one in read if isinstance(one, torch.Tensor)]
    assert sorted(str(one.dtype) for one in tensors) == ["torch.float32"] + ["torch.int64"] * 3
    sizes = [one for one in read if not isinstance(one, torch.Tensor)]
    assert all(isinstance(one, torch.SymInt) and one.node.expr.is_Symbol for one in sizes)


def test_a_table_of_biases_is_where_the_step_is() -> None:
    """A layer may give it on a CPU. Tensors of the device meta stand for those of a GPU."""
    positions = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    group = SimpleNamespace(q_positions=positions, k_positions=positions, longest=3)
    bias = backend._bias(replace(make_step().layer.params, bias=OffsetTable(4)), group)
    assert {cell.cell_contents.device.type for cell in bias.__closure__} == {"meta"}


def test_entry_module_imports_no_torch() -> None:
    code = "import sys, toolkit_lm_flex; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )


def test_entry_module_registers_the_backend_below_the_reference() -> None:
    backends = AttentionBackendRegistry(owner=PluginInfo("flex"))
    toolkit_lm_flex.toolkit_register_attention_backends(backends)
    assert [(entry.key, entry.priority) for entry in backends.entries()] == [("flex", -10)]
    assert backends.load("flex") is FlexBackend
