"""The backend's contract: refusals, registration; how it plans and runs FlashInfer's wrappers."""

import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import flashinfer_stand_in
import msgspec
import pytest
import toolkit_lm_flashinfer
import torch
from flashinfer_stand_in import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    StandInBackend,
)
from test_flashinfer_pages import make_batch
from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchLimits,
    GraphSupport,
    GroupSetup,
)
from toolkit_lm.kv import CrossSpec, FullSpec, PageTensor, WindowSpec
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo
from toolkit_lm_devkit import AttentionStep
from toolkit_lm_flashinfer.backend import FlashInferBackend

SPEC = AttentionSpec(
    layer="model.layers.0.self_attn.attn",
    type=AttentionType.DECODER,
    num_heads=4,
    num_kv_heads=2,
    head_size=128,
    dtype="bfloat16",
    device="cuda",
    kv_cache=FullSpec(block_size=16, num_kv_heads=2, head_size=128, dtype="bfloat16"),
)


@pytest.mark.parametrize("type", AttentionType)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_runs_every_type(type, dtype, head_size) -> None:
    kept = msgspec.structs.replace(SPEC.kv_cache, dtype=dtype)
    assert (
        FlashInferBackend.lacks(
            msgspec.structs.replace(
                SPEC, type=type, dtype=dtype, kv_cache=kept, head_size=head_size, soft_cap=30.0
            )
        )
        is None
    )


def test_runs_windows_of_decoders() -> None:
    assert FlashInferBackend.lacks(msgspec.structs.replace(SPEC, window=7, soft_cap=30.0)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "no kernel for float32, only for bfloat16, float16"),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        ({"head_size": 80}, "no kernel for head_size 80, only for 64, 128, 256"),
        (
            {"type": AttentionType.CROSS, "window": 7},
            "window relates positions of one sequence, and cross attention has two",
        ),
        (
            {"type": AttentionType.ENCODER, "window": 7},
            "FlashInfer's windows end at the query, and an encoder's reach beyond it",
        ),
        ({"bias": True}, "FlashInfer's wrappers of paged caches have no bias"),
        (
            {"bias": True, "sinks": True, "spans": True},
            "FlashInfer's wrappers of paged caches have no bias and no sinks and no spans",
        ),
    ],
)
def test_what_flashinfer_lacks(change, reason) -> None:
    assert FlashInferBackend.lacks(msgspec.structs.replace(SPEC, **change)) == reason


def test_refuses_other_devices() -> None:
    assert (
        FlashInferBackend.refuses(msgspec.structs.replace(SPEC, device="cpu"))
        == "no kernel for device cpu, only for cuda"
    )


def test_without_the_package_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = (
        "the package flashinfer is not installed: pip install 'toolkit-lm-flashinfer[kernels]'"
    )
    assert FlashInferBackend.refuses(SPEC) == missing


@pytest.mark.parametrize(
    ("available", "capability", "reason"),
    [
        (False, None, "no GPU is there"),
        (True, (7, 5), "the GPU has compute capability 7.5, and FlashInfer needs 8.0"),
        (True, (8, 0), None),
        (True, (10, 0), None),
    ],
)
def test_needs_a_gpu_that_has_the_kernels(monkeypatch, available, capability, reason) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert FlashInferBackend.refuses(SPEC) == reason


def shape_of(function) -> list[tuple]:
    """Names, kinds and defaults of parameters. Annotations do not count."""
    return [
        (one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="the package flashinfer is not installed"
)
@pytest.mark.parametrize(
    "ours", [BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper]
)
def test_the_stand_in_has_the_signatures_of_flashinfer(ours) -> None:
    theirs = getattr(pytest.importorskip("flashinfer", exc_type=ImportError), ours.__name__)
    names = [name for name in ("__init__", "plan", "_plan_impl", "run") if name in vars(ours)]
    assert {name: shape_of(getattr(ours, name)) for name in names} == {
        name: shape_of(getattr(theirs, name)) for name in names
    }


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """(wrapper, method, positional, named) of each call."""
    calls = []
    for wrapper in (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper):
        for name in ("__init__", "plan", "run"):

            def spy(self, *given, _name=name, _method=getattr(wrapper, name), **named):
                calls.append(
                    (
                        "decode" if "Decode" in type(self).__name__ else "prefill",
                        _name,
                        given,
                        named,
                    )
                )
                return _method(self, *given, **named)

            monkeypatch.setattr(wrapper, name, spy)
    return calls


def plans(calls) -> list[tuple]:
    return [(kind, given, named) for kind, name, given, named in calls if name == "plan"]


def test_one_query_for_each_row_is_a_decode(calls) -> None:
    AttentionStep(StandInBackend, [(1, 40), (1, 7)], soft_cap=2.0, window=9).run()
    kind, (indptr, ids, last_page_len, *shape), named = plans(calls)[-1]
    assert (kind, indptr.tolist(), last_page_len.tolist(), len(ids)) == (
        "decode",
        [0, 9, 16],
        [1, 1],
        16,
    )
    assert shape == [4, 2, 16, 1]
    assert named == {
        "sm_scale": 1.0,
        "logits_soft_cap": 2.0,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
    }
    ((given, named),) = [(given, named) for _, name, given, named in calls if name == "run"]
    assert named["q_scale"] == 0.25 and named["out"].shape == given[0].shape


@pytest.mark.parametrize(("window", "left", "page_size"), [(None, -1, 16), (9, 8, 1)])
def test_other_steps_are_a_prefill(calls, window, left, page_size) -> None:
    AttentionStep(StandInBackend, [(3, 40), (1, 7)], window=window).run()
    kind, (query_start, indptr, _, last_page_len, *shape), named = plans(calls)[-1]
    assert (kind, query_start.tolist(), shape) == ("prefill", [0, 3, 4], [4, 2, 16, page_size])
    assert indptr.tolist() == ([0, 3, 4] if window is None else [0, 11, 18])
    assert last_page_len.tolist() == ([8, 7] if window is None else [1, 1])
    assert (named["causal"], named["window_left"]) == (True, left)


@pytest.mark.parametrize("type", [AttentionType.ENCODER, AttentionType.CROSS])
def test_what_is_not_causal(calls, type) -> None:
    AttentionStep(
        StandInBackend, [(3, 3), (7, 7)], type=type, cached=type is AttentionType.CROSS
    ).run()
    ((_, _, named),) = plans(calls)[-1:]
    assert (named["causal"], named["window_left"]) == (False, -1)


def test_layers_that_are_alike_share_a_plan(calls) -> None:
    """Layers of one group may differ in their soft caps and heads."""
    specs = [
        msgspec.structs.replace(SPEC, layer=str(n), device="cpu", soft_cap=cap)
        for n, cap in enumerate([None, 30.0, None])
    ]
    backend = StandInBackend(
        GroupSetup(
            layers=specs,
            kv_cache=SPEC.kv_cache,
            limits=BatchLimits(4, 8, 64),
            device=torch.device("cpu"),
        )
    )
    meta = backend.build(make_batch([(1, 9), (1, 20)], 16))
    assert [named["logits_soft_cap"] for _, _, named in plans(calls)] == [None, 30.0]
    assert len(meta.runs) == 2 and len({id(run.wrapper) for run in meta.runs.values()}) == 2
    backend.build(make_batch([(1, 10), (1, 21)], 16))
    assert sum(name == "__init__" for _, name, _, _ in calls) == 2, "wrappers are made once"
    workspaces = {given[0].data_ptr() for _, name, given, _ in calls if name == "__init__"}
    assert len(workspaces) == 1, "one workspace is enough"


def test_tokens_without_keys_give_zeros() -> None:
    assert not AttentionStep(StandInBackend, [(1, 0), (2, 0)], type=AttentionType.CROSS).run().any()
    found = AttentionStep(StandInBackend, [(2, 0), (2, 5), (1, 0)], type=AttentionType.CROSS).run()
    assert not found[[0, 1, 4]].any() and found[2:4].all()


def test_an_output_with_gaps() -> None:
    step = AttentionStep(StandInBackend, [(3, 3), (4, 4)], cached=False)
    spec = step.layer.attention_spec(torch.device("cpu"), cached=False)
    backend = StandInBackend(
        GroupSetup(
            layers=[spec], kv_cache=None, limits=BatchLimits(2, 7, 8), device=torch.device("cpu")
        )
    )
    # Slices of one product, whose heads' elements are not adjacent.
    q, k, v = (
        torch.cat(x).transpose(0, 2).contiguous().transpose(0, 2) for x in (step.q, step.k, step.v)
    )
    out = torch.empty(7, 8, 16)[:, ::2]
    meta = backend.build(make_batch(step.rows))
    backend.forward(AttentionCall(step.layer.params, q, k, v, None, meta, out))
    torch.testing.assert_close(out, step.run())


def test_a_page_holds_keys_and_values() -> None:
    fields = msgspec.structs.asdict(SPEC.kv_cache)
    for spec in (SPEC.kv_cache, WindowSpec(window=9, **fields), CrossSpec(**fields)):
        assert FlashInferBackend.page_layout(spec) == [PageTensor((2, 16, 2, 128), "bfloat16")]


def test_graphs_hold_decodes() -> None:
    assert FlashInferBackend.graphs(SPEC) is GraphSupport.DECODE


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("toolkit_lm_flashinfer", "torch"), ("toolkit_lm_flashinfer.backend", "flashinfer")],
)
def test_nothing_heavy_is_imported_before_it_is_needed(module, heavy) -> None:
    code = f"import sys, {module}; sys.exit({heavy!r} in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )


def test_the_backend_takes_its_wrappers_from_the_package(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    backend = FlashInferBackend(
        GroupSetup(
            layers=[SPEC],
            kv_cache=SPEC.kv_cache,
            limits=BatchLimits(4, 8, 64),
            device=torch.device("cpu"),
        )
    )
    assert backend.library() is flashinfer_stand_in


def test_entry_module_registers_below_the_reference() -> None:
    backends = AttentionBackendRegistry(owner=PluginInfo("flashinfer"))
    toolkit_lm_flashinfer.toolkit_register_attention_backends(backends)
    assert [(entry.key, entry.priority) for entry in backends.entries()] == [("flashinfer", -7)]
    assert backends.load("flashinfer") is FlashInferBackend
