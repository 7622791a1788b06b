from __future__ import annotations

import pytest
from toolkit_lm.attention import KVCacheSpec, block_bytes, group_layers, tensors_per_shape


def spec(window=None, heads=2):
    kind = "full" if window is None else "window"
    return KVCacheSpec(kind=kind, block_size=16, num_kv_heads=heads, head_size=8, dtype="float32", window=window)


def groups_of(*specs, backends=None):
    names = [f"layers.{i}" for i in range(len(specs))]
    return group_layers(dict(zip(names, specs, strict=True)), dict(zip(names, backends or ["b"] * len(names), strict=True)))


def test_equal_layers_are_one_group():
    (group,) = groups_of(*[spec()] * 5)
    assert group.layers == [f"layers.{i}" for i in range(5)]
    assert block_bytes([group]) == 5 * spec().block_bytes


@pytest.mark.parametrize("pattern", ["FW" * 4, "WWWWWF" * 4, "WWWWWF" * 4 + "WW"])
def test_windowed_and_full_layers_share_memory(pattern):
    groups = groups_of(*(spec(8) if kind == "W" else spec() for kind in pattern))
    assert len({g.shape for g in groups}) == 1
    sizes = [len(g.layers) for g in groups]
    assert sum(sizes) == len(pattern) and max(sizes) - min(sizes) <= 1
    assert len(sizes) <= 8
    assert list(tensors_per_shape(groups).values()) == [max(sizes)]
    # One block id takes the memory of one group's layers, not of all layers.
    assert block_bytes(groups) == max(sizes) * spec().block_bytes
    assert sorted(layer for g in groups for layer in g.layers) == sorted(f"layers.{i}" for i in range(len(pattern)))
    assert all(len({pattern[int(layer.split(".")[1])] for layer in g.layers}) == 1 for g in groups)


def test_one_odd_layer_does_not_make_a_group_of_each():
    assert len(groups_of(spec(), *[spec(8)] * 31)) <= 9


def test_other_shapes_and_backends_have_memory_of_their_own():
    groups = groups_of(spec(), spec(heads=4), spec(), backends=["b", "b", "c"])
    assert len(tensors_per_shape(groups)) == 3
    assert block_bytes(groups) == 2 * spec().block_bytes + spec(heads=4).block_bytes


@pytest.mark.parametrize(
    ("window", "tokens", "chunk", "most"), [(None, 100, 8, 7), (16, 100, 1, 2), (16, 100, 16, 3), (16, 10, 100, 1), (1, 100, 1, 2)]
)
def test_blocks_of_a_sequence_are_bounded_by_its_window(window, tokens, chunk, most):
    assert spec(window).blocks_for(tokens, chunk) == most
