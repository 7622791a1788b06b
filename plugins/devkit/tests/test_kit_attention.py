"""AttentionBackendConformance finds what is wrong with a backend."""

from __future__ import annotations

import msgspec
import pytest
import torch
from toolkit_lm.attention import AttentionBackend, AttentionType
from toolkit_lm_devkit import AttentionBackendConformance


class Right(AttentionBackend):
    """Decoder rows, one by one, in float32 arithmetic."""

    @classmethod
    def refuses(cls, spec):
        if spec.dtype not in ("float32", "bfloat16") or spec.type is not AttentionType.DECODER or spec.block_size is None:
            return "not that"
        return "no such feature" if spec.sinks or spec.bias or spec.spans or spec.window or spec.soft_cap else None

    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)

    def build(self, batch):
        return batch

    def write_kv(self, layer, k, v, kv_cache, slot_mapping):
        for half, new in zip(kv_cache, (k, v), strict=True):
            half.view(-1, *new.shape[1:])[slot_mapping] = new

    def forward(self, layer, q, k, v, kv_cache, meta, out):
        size, group = kv_cache.shape[2], layer.num_heads // layer.num_kv_heads
        for row, end in enumerate(meta.seq_lens.tolist()):
            tokens = slice(int(meta.query_start[row]), int(meta.query_start[row + 1]))
            keys = self.keys(end, size)
            slots = meta.block_table[row][keys // size].long() * size + keys % size
            k_row, v_row = (half.view(-1, *k.shape[1:])[slots].float().repeat_interleave(group, 1).transpose(0, 1) for half in kv_cache)
            scores = q[tokens].float().transpose(0, 1) @ k_row.transpose(1, 2) * layer.scale
            first = end - tokens.stop + tokens.start
            hidden = keys[None] > torch.arange(first, end)[:, None]
            out[tokens] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v_row).transpose(0, 1).to(q.dtype)

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


class Silent(Right):
    @classmethod
    def refuses(cls, spec):
        return " " if super().refuses(spec) else None


class Wasteful(Right):
    @classmethod
    def kv_cache_shape(cls, spec, num_blocks):
        return (2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size + 1)


def kit(name):
    return type("Kit", (AttentionBackendConformance,), {"backend": name})()


def failures(name):
    """Cases of a backend that fail."""
    subject, failed = kit(name), []
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


def test_a_refusal_without_a_reason_is_found():
    with pytest.raises(AssertionError):
        kit(Silent).test_refuses_with_a_reason(("sinks", True))


def test_a_cache_of_another_size_is_found():
    with pytest.raises(AssertionError):
        kit(Wasteful).test_cache_shape_counts_blocks_and_bytes()


def test_a_backend_that_runs_nothing_is_found():
    class Refusing(Right):
        @classmethod
        def refuses(cls, spec):
            return "no"

    with pytest.raises(AssertionError, match="refuses every layer"):
        kit(Refusing).test_runs_some_layers()
