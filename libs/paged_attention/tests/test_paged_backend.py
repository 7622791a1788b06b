"""PagedBackend: the page, the metadata of a step, and what is stored where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm.attention import AttentionCall, BatchLimits, BatchView, GroupSetup, LayerParams
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm_paged_attention import (
    OffsetTables,
    PagedBackend,
    PagedStep,
    key_places,
    keys_and_values,
    places_of_keys,
)

BLOCK = 4
HEADS = 2
SIZE = 3
SPEC = FullSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype="float32")


class Backend(PagedBackend):
    @classmethod
    def refuses(cls, spec):
        return None

    def forward(self, call):
        call.out.copy_(call.q)


def backend_of(spec=SPEC) -> Backend:
    limits = BatchLimits(4, 16, 64)
    return Backend(GroupSetup(layers=[], kv_cache=spec, limits=limits, device=torch.device("cpu")))


def batch_of(slots, lengths=(), table=None, **fields) -> BatchView:
    """Rows of one token each, unless `query_start` is among the fields."""
    seen = np.array(lengths or [1] * len(slots), np.int32)
    start = fields.pop("query_start", np.arange(len(seen) + 1, dtype=np.int32))
    return BatchView(
        query_start=start,
        seq_lens=seen,
        starts=np.zeros(len(seen), np.int64),
        query_start_device=torch.from_numpy(start),
        seq_lens_device=torch.from_numpy(seen),
        block_table=table,
        slot_mapping=None if slots is None else torch.tensor(slots),
        max_query_len=1,
        max_seq_len=int(seen.max()),
        **fields,
    )


def stored(backend: Backend, batch: BatchView) -> dict[int, int]:
    """Slot -> the token whose key and value lie there."""
    cache = torch.full((5, 2, BLOCK, HEADS, SIZE), torch.nan)
    tokens = torch.arange(len(batch.slot_mapping), dtype=torch.float32)
    k = tokens[:, None, None].expand(-1, HEADS, SIZE)
    layer = LayerParams(
        name="a",
        attention_type="decoder",
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        scale=1.0,
    )
    backend.write_kv(AttentionCall(layer, k, k, k + 100, (cache,), backend.build(batch), k))
    keys, values = cache[..., 0, 0].flatten(2).unbind(1)
    assert torch.equal(values, keys + 100) or torch.equal(values.isnan(), keys.isnan())
    found = {slot: int(key) for slot, key in enumerate(keys.flatten().tolist()) if key == key}
    assert all(values.flatten()[slot] == token + 100 for slot, token in found.items())
    return found


def test_the_page_of_keys_and_values():
    assert PagedBackend.page_layout(SPEC) == [PageTensor((2, BLOCK, HEADS, SIZE), "float32")]


@pytest.mark.parametrize("scales", ["none", "token", "layer"])
def test_the_page_has_the_bytes_of_the_spec(scales):
    spec = FullSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype="int8", scales=scales
    )
    sizes = {"int8": 1, "float32": 4}
    page = PagedBackend.page_layout(spec)
    assert sum(int(np.prod(x.shape)) * sizes[x.dtype] for x in page) == spec.page_bytes
    assert len(page) == 1 + (scales == "token")


def test_each_token_at_its_slot():
    assert stored(backend_of(), batch_of([9, 0, 19])) == {9: 0, 0: 1, 19: 2}


def test_padding_is_not_stored():
    assert stored(backend_of(), batch_of([-1, 7, -1], has_padding=True)) == {7: 1}
    assert stored(backend_of(), batch_of([-1, -1], has_padding=True)) == {}


def test_a_step_in_a_graph_stays_where_it_was():
    backend = backend_of()
    graph = {"has_padding": True, "is_fixed": True}
    first = backend.build(batch_of([5, 6, -1], **graph)).store
    assert stored(backend, batch_of([5, 6, -1], **graph)) == {5: 0, 6: 1}
    assert stored(backend, batch_of([-1, 3, 9], **graph)) == {3: 1, 9: 2}
    again = backend.build(batch_of([1, 2, 3], **graph)).store
    assert [x.data_ptr() for x in again] == [x.data_ptr() for x in first]
    assert again.places.tolist() == [1, 2, 3]
    assert len(backend.build(batch_of([1], **graph)).store.places) == 1


def test_nothing_is_stored_without_a_cache():
    assert backend_of(None).build(batch_of(None, [3])).store is None


def test_a_plan_is_made_once_for_a_key():
    made = []
    step = PagedStep(batch_of([0]), None)

    def make(batch, key):
        made.append(key)
        assert batch is step.batch
        return [key]

    assert step.plan("a", make) is step.plan("a", make)
    assert step.plan("b", make) == ["b"]
    assert made == ["a", "b"]


def test_places_of_slots():
    assert key_places(torch.tensor([0, 3, 4, 9]), 4).tolist() == [0, 3, 8, 17]


def places(rows, first, counts, block_size):
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    batch = batch_of(None, [6, 5], table, query_start=np.array([0, 2, 7], np.int32))
    arrays = (np.array(x, np.int64) for x in (rows, first, counts))
    return places_of_keys(batch, *arrays, block_size).tolist()


def test_places_of_the_keys_of_sequences():
    assert places([1, 0], [0, 1], [5, 2], None) == [2, 3, 4, 5, 6, 1, 2]
    # Row 0 has the blocks 3 and 1, row 1 the blocks 0 and 4.
    assert places([0, 1, 1], [3, 0, 4], [2, 0, 1], BLOCK) == [3 * 8 + 3, 1 * 8, 4 * 8]


def test_keys_and_values_of_places():
    x = torch.arange(4.0)[:, None, None].expand(-1, HEADS, SIZE)
    cache = torch.arange(16.0)[:, None, None].expand(-1, HEADS, SIZE).contiguous()
    call = AttentionCall(None, x, x, x + 0.5, None, None, x)
    at = torch.tensor([2, 0])
    assert keys_and_values(call, None)[0] is x
    assert [y[:, 0, 0].tolist() for y in keys_and_values(call, at)] == [[2, 0], [2.5, 0.5]]
    pages = (cache.view(2, 2, BLOCK, HEADS, SIZE),)
    cached = AttentionCall(None, x, None, None, pages, None, x)
    assert [y[:, 0, 0].tolist() for y in keys_and_values(cached, at)] == [[2, 0], [6, 4]]


def test_tables_of_offsets_grow_by_doubling():
    asked = []

    class Bias:
        def by_offset(self, most):
            asked.append(most)
            return torch.arange(-most, most + 1)[None]

    tables = OffsetTables(torch.device("cpu"))
    bias = Bias()
    for most in (3, 2, 4, 7, 9):
        table = tables.find(bias, most)
        middle = table.shape[1] // 2
        assert table[0, middle - most : middle + most + 1].tolist() == list(range(-most, most + 1))
    assert asked == [4, 8, 16]
