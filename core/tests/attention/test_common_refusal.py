"""Layers that no backend of keys and values runs, whatever its kernels are."""

import pytest
from msgspec.structs import replace
from toolkit_lm.attention import AttentionSpec, AttentionType, common_refusal
from toolkit_lm.kv import FullSpec, KVCacheSpec

DTYPES = ("bfloat16", "float16")
SPEC = AttentionSpec(
    layer="attn",
    type=AttentionType.DECODER,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    dtype="float16",
    device="cuda",
    kv_cache=FullSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float16"),
)
CROSS = {"type": AttentionType.CROSS}
ENCODER = {"type": AttentionType.ENCODER}


class Recurrent(KVCacheSpec, frozen=True, kw_only=True, tag="recurrent"):
    pass


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 7, "bias": True, "sinks": True, "soft_cap": 2.0, "spans": True},
        {"kv_cache": None},
        {**CROSS, "sinks": True, "soft_cap": 2.0},
        {**ENCODER, "kv_cache": None, "window": 7, "bias": True},
    ],
)
def test_what_a_backend_may_run(change) -> None:
    assert common_refusal(replace(SPEC, **change), DTYPES) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "no kernel for float32, only for bfloat16, float16"),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        (
            {"kv_cache": Recurrent(block_size=16)},
            "no layout for a cache of kind 'recurrent', only for keys and values",
        ),
        (
            {**CROSS, "window": 7},
            "window relates positions of one sequence, and cross attention has two",
        ),
        (
            {**CROSS, "window": 7, "bias": True},
            "window and bias relate positions of one sequence, and cross attention has two",
        ),
        (
            {**ENCODER, "spans": True},
            "spans are of decoders, and this is attention of type 'encoder'",
        ),
    ],
)
def test_what_none_runs(change, reason) -> None:
    assert common_refusal(replace(SPEC, **change), DTYPES) == reason
