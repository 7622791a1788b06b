"""The backend's contract: refusals, cache shape, buckets, registration."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import toolkit_lm_sdpa
import torch
from toolkit_lm.attention import AttentionSpec, AttentionType
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo
from toolkit_lm_sdpa.backend import SdpaBackend
from toolkit_lm_sdpa.plan import split

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


@pytest.mark.parametrize("type", AttentionType)
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_runs_every_type_on_any_device(type, device) -> None:
    assert SdpaBackend.refuses(msgspec.structs.replace(SPEC, type=type, device=device)) is None


def test_runs_every_feature_at_once() -> None:
    assert (
        SdpaBackend.refuses(
            msgspec.structs.replace(SPEC, window=7, soft_cap=30.0, sinks=True, bias=True)
        )
        is None
    )


def test_refuses_a_dtype_without_arithmetic() -> None:
    reason = SdpaBackend.refuses(msgspec.structs.replace(SPEC, dtype="float8_e4m3fn"))
    assert reason == "no kernel for float8_e4m3fn, only for float32, bfloat16, float16"


def test_refuses_relative_positions_across_sequences() -> None:
    reason = SdpaBackend.refuses(
        msgspec.structs.replace(SPEC, type=AttentionType.CROSS, window=7, bias=True)
    )
    assert reason == "window and bias relate positions of one sequence, and cross attention has two"


def test_a_page_holds_keys_and_values() -> None:
    spec = FullSpec(block_size=16, num_kv_heads=2, head_size=80, dtype="bfloat16")
    assert SdpaBackend.page_layout(spec) == [PageTensor((2, 16, 2, 80), "bfloat16")]
    assert torch.empty(2, 16, 2, 80, dtype=torch.bfloat16).nbytes == spec.page_bytes


@pytest.mark.parametrize("seed", range(5))
def test_buckets_hold_each_row_once_and_waste_at_most_half(seed) -> None:
    lengths = np.random.default_rng(seed).integers(1, 2000, size=50)
    parts = split(lengths)
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))
    for part in parts:
        longest = lengths[part].max()
        assert longest <= 64 or 2 * lengths[part].min() >= longest
        assert len(part) == 1 or len(part) * longest <= 32768


def test_similar_rows_share_one_bucket_in_order() -> None:
    (part,) = split(np.array([180, 207, 199, 150]))
    assert part.tolist() == [0, 1, 2, 3]


def test_a_row_longer_than_a_bucket_is_one() -> None:
    assert [part.tolist() for part in split(np.array([100_000, 90_000]))] == [[0], [1]]


def test_entry_module_imports_no_torch() -> None:
    code = "import sys, toolkit_lm_sdpa; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )


def test_entry_module_registers_the_backend_below_all_faster_ones() -> None:
    backends = AttentionBackendRegistry(owner=PluginInfo("sdpa"))
    toolkit_lm_sdpa.toolkit_register_attention_backends(backends)
    assert [(entry.key, entry.priority) for entry in backends.entries()] == [("sdpa", 0)]
    assert backends.load("sdpa") is SdpaBackend
