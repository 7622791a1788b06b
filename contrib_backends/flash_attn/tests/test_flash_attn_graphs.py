"""Decode steps in CUDA graphs, with a stand-in for the kernel: what it is told lies where it
lay."""

from __future__ import annotations

import msgspec
import pytest
import torch
from decode_graphs import MOST, ROWS, FixedSteps
from stand_in_kernel import PAGING, attend, backend_of
from test_flash_attn_backend import PACKAGE, SPEC, TORCH
from toolkit_lm.attention import AttentionType, GraphSupport
from toolkit_lm.kv import FullSpec
from torch.utils._python_dispatch import _disable_current_modes


@pytest.mark.parametrize(
    "features", [{"window": None}, {"window": 6}, {"window": 40, "soft_cap": 2.0}], ids=str
)
def test_later_steps_read_where_the_recorded_one_read(features) -> None:
    """`build` fills tensors at the same addresses, with room for the longest rows, and leaves
    nothing of longer steps in them."""
    told = []
    found = torch.empty(ROWS, 4, 64)

    def spy(q, k, v, given, scale, soft_cap):
        tensors = (q, k, v, given.query_start, given.key_start, given.block_table)
        numbers = (
            given.max_queries,
            given.max_keys,
            given.causal,
            given.window,
            given.keys,
            scale,
            soft_cap,
        )
        told.append(([(one.data_ptr(), one.shape, one.stride()) for one in tensors], numbers))
        # The stand-in reads by numbers on the host, as the kernel does on the device.
        with _disable_current_modes():
            return found.copy_(attend(q, k, v, given, scale, soft_cap))

    steps = FixedSteps(backend_of(PAGING._replace(attend=spy)), **features)
    recorded = steps.run([9, 0, 0, 0]), told.pop()
    assert recorded[1][1][:2] == (1, MOST)
    for lengths in ([MOST] * ROWS, [10, 2, 30, 0], [0, 16, 1, 33], [3, 0, 0, 0]):
        assert (steps.run(lengths), told.pop()) == recorded


NO_DECODER = "only layers of decoders have as many queries in each step"
PAGES_OF_256 = FullSpec(block_size=256, num_kv_heads=2, head_size=80, dtype="bfloat16")


@pytest.mark.parametrize(
    ("kernel", "change", "answer"),
    [
        (PACKAGE, {"kv_cache": PAGES_OF_256}, GraphSupport.DECODE),
        (
            PACKAGE,
            {},
            (
                "FlashAttention of flash_attn reads pages of a multiple of 256 tokens, and "
                "block_size is 16"
            ),
        ),
        (
            PACKAGE,
            {"kv_cache": PAGES_OF_256, "type": AttentionType.CROSS},
            NO_DECODER,
        ),
        (
            TORCH,
            {"kv_cache": PAGES_OF_256},
            (
                "FlashAttention of torch reads no pages, so that all keys are gathered for it, "
                "as many as there are"
            ),
        ),
    ],
)
def test_graphs_hold_decodes_of_kernels_that_read_pages(kernel, change, answer) -> None:
    assert backend_of(kernel).graphs(msgspec.structs.replace(SPEC, **change)) == answer
