"""AttentionBackendConformance finds what is wrong with a backend."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch
from toolkit_lm.attention import AttentionBackend, AttentionType
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm_devkit import AttentionBackendConformance


class Right(AttentionBackend):
    """Decoder rows, one by one, in float32 arithmetic."""

    @classmethod
    def refuses(cls, spec):
        if (
            spec.dtype not in ("float32", "bfloat16")
            or spec.type is not AttentionType.DECODER
            or not isinstance(spec.kv_cache, FullSpec)
            or spec.kv_cache.dtype != spec.dtype
        ):
            return "not that"
        return (
            "no such feature"
            if spec.sinks or spec.bias or spec.window or spec.soft_cap or spec.spans
            else None
        )

    @classmethod
    def page_layout(cls, spec):
        return [PageTensor((spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype)] * 2

    def build(self, batch):
        return batch

    def write_kv(self, call):
        stored = self.stored(call.metadata.slot_mapping)
        slots = call.metadata.slot_mapping[stored]
        for half, new in zip(call.kv_cache, (call.k, call.v), strict=True):
            half[slots // half.shape[1], slots % half.shape[1]] = new[stored]

    def stored(self, slots):
        return slots >= 0

    def forward(self, call):
        layer = call.layer
        q = call.q
        meta = call.metadata
        kv_cache = call.kv_cache
        size = kv_cache[0].shape[1]
        group = layer.num_heads // layer.num_kv_heads
        for row, end in enumerate(meta.seq_lens.tolist()):
            tokens = slice(int(meta.query_start[row]), int(meta.query_start[row + 1]))
            keys = self.keys(end, size)
            blocks = meta.block_table[row][keys // size].long()
            k_row, v_row = (
                half[blocks, keys % size].float().repeat_interleave(group, 1).transpose(0, 1)
                for half in kv_cache
            )
            scores = q[tokens].float().transpose(0, 1) @ k_row.transpose(1, 2) * layer.scale
            first = end - tokens.stop + tokens.start
            hidden = keys[None] > torch.arange(first, end)[:, None]
            call.out[tokens] = (
                (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v_row)
                .transpose(0, 1)
                .to(q.dtype)
            )

    def keys(self, end, block_size):
        return torch.arange(end)


class Leaking(Right):
    """Reads whole blocks, and relies on the mask: what lies in unused slots is multiplied by 0."""

    def keys(self, end, block_size):
        return torch.arange(-(-end // block_size) * block_size)


class Ignoring(Right):
    """Claims soft caps, and does not know them."""

    @classmethod
    def refuses(cls, spec):
        return super().refuses(msgspec.structs.replace(spec, soft_cap=None))


class Unscaled(Right):
    """Scales scores by the size of heads, whatever the layer says."""

    def forward(self, call):
        layer = replace(call.layer, scale=call.layer.head_size**-0.5)
        super().forward(msgspec.structs.replace(call, layer=layer))


class Silent(Right):
    @classmethod
    def refuses(cls, spec):
        return " " if super().refuses(spec) else None


class Wasteful(Right):
    @classmethod
    def page_layout(cls, spec):
        return [
            PageTensor((spec.block_size, spec.num_kv_heads, spec.head_size + 1), spec.dtype)
        ] * 2


class Unpadded(Right):
    """Stores padding in the last slot."""

    def stored(self, slots):
        return slots >= -1


def kit(name):
    return type("Kit", (AttentionBackendConformance,), {"backend": name})()


def failures(name):
    """Cases of a backend that fail."""
    subject = kit(name)
    failed = []
    for case in subject.parameters()["case"].values():
        try:
            subject.test_equals_the_formula(case)
        except AssertionError:
            failed.append(case)
    return failed


class TestRight(AttentionBackendConformance):
    backend = Right


def test_a_read_of_unused_slots_is_found():
    assert {case["block_size"] for case in failures(Leaking)} == {16, 17, 32}


def test_a_feature_that_is_ignored_is_found():
    failed = failures(Ignoring)
    assert failed
    assert all(case["soft_cap"] for case in failed)


def test_a_scale_that_is_ignored_is_found():
    failed = failures(Unscaled)
    assert failed
    assert all(case["scale"] is not None for case in failed)


def test_a_refusal_without_a_reason_is_found():
    with pytest.raises(AssertionError):
        kit(Silent).test_refuses_with_a_reason(("sinks", True))


def test_a_cache_of_another_size_is_found():
    with pytest.raises(AssertionError):
        kit(Wasteful).test_page_layout_fills_the_page()


def test_a_backend_that_runs_nothing_is_found():
    class Refusing(Right):
        @classmethod
        def refuses(cls, spec):
            return "no"

    with pytest.raises(AssertionError, match="refuses every layer"):
        kit(Refusing).test_runs_some_layers()


def test_padding_that_is_stored_is_found():
    kit(Right).test_padding_is_not_stored()
    with pytest.raises(AssertionError, match="padding is stored"):
        kit(Unpadded).test_padding_is_not_stored()
