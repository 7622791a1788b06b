from __future__ import annotations

from typing import ClassVar

import msgspec
import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine.memory import size_kv_cache
from toolkit_lm.kv import (
    BlockManager,
    FullSpec,
    KVCacheConfig,
    KVCacheSpec,
    WindowSpec,
    plan_groups,
)
from toolkit_lm.plugin import Plugins


def spec(window=None, heads=2):
    shape = {"block_size": 16, "num_kv_heads": heads, "head_size": 8, "dtype": "float32"}
    return FullSpec(**shape) if window is None else WindowSpec(window=window, **shape)


def plan(*specs, backends=None) -> KVCacheConfig:
    names = [f"layers.{i}" for i in range(len(specs))]
    return plan_groups(
        dict(zip(names, specs, strict=True)),
        dict(zip(names, backends or ["b"] * len(names), strict=True)),
    )


def test_equal_layers_are_one_group():
    planned = plan(*[spec()] * 5)
    [group] = planned.groups
    [pool] = planned.pools
    assert group.layers == [f"layers.{i}" for i in range(5)]
    assert pool.block_bytes == 5 * spec().page_bytes


def test_layers_of_a_part_split_no_group_of_the_model():
    """Their pages are as large as the model's, and yet their pool is their own."""
    own = msgspec.structs.replace(spec(), lookahead=4)
    names = [*(f"layers.{i}" for i in range(6)), "drafter/head.layers.0"]
    planned = plan_groups(
        dict(zip(names, [*[spec()] * 6, own], strict=True)), dict.fromkeys(names, "b")
    )
    assert [group.layers for group in planned.groups] == [names[:6], names[6:]]
    assert [group.is_apart for group in planned.groups] == [False, True]
    assert [pool.num_pages for pool in planned.pools] == [6, 1]


def test_layers_that_trail_are_a_group_of_their_own():
    trailing = msgspec.structs.replace(spec(), lag=1)
    planned = plan(spec(), trailing)
    assert [group.layers for group in planned.groups] == [["layers.0"], ["layers.1"]]
    kept = [plan(msgspec.structs.replace(spec(16), lag=lag)) for lag in (0, 1)]
    assert [one.max_blocks(400, 17) for one in kept] == [[3], [4]]


@pytest.mark.parametrize("pattern", ["FW" * 4, "WWWWWF" * 4, "WWWWWF" * 4 + "WW"])
def test_windowed_and_full_layers_share_memory(pattern):
    planned = plan(*(spec(8) if kind == "W" else spec() for kind in pattern))
    groups = planned.groups
    [pool] = planned.pools
    sizes = [len(g.layers) for g in groups]
    assert sum(sizes) == len(pattern) and max(sizes) - min(sizes) <= 1
    assert len(sizes) <= 8
    # One block id takes the memory of one group's layers, not of all layers.
    assert pool.num_pages == max(sizes)
    assert sorted(layer for g in groups for layer in g.layers) == sorted(
        f"layers.{i}" for i in range(len(pattern))
    )
    assert all(len({pattern[int(layer.split(".")[1])] for layer in g.layers}) == 1 for g in groups)


@pytest.mark.parametrize("specs", [[*[spec()] * 32, spec(8)], [spec(), *[spec(8)] * 31]])
def test_one_odd_layer_makes_one_group_more(specs):
    assert len(plan(*specs).groups) == 2


def test_backends_with_pages_of_one_size_share_a_pool():
    assert len(plan(spec(), spec(), backends=["b", "c"]).pools) == 1


@pytest.mark.parametrize("odd", [spec(heads=4), spec(8)])
def test_one_odd_layer_costs_less_than_a_twentieth_of_the_tokens(odd):
    """Compared with the tokens that the same bytes hold if each layer's keys and values are counted
    alone."""
    specs = [*[spec()] * 32, odd]
    memory = 2**26
    config = VllmConfig.default(
        max_model_len=2048, kv_cache_memory=str(memory), max_num_batched_tokens=64
    )
    sized = size_kv_cache(plan(*specs), config, 2**40, 0)
    assert sum(pool.num_blocks * pool.block_bytes for pool in sized.pools) <= memory
    per_pool = sized.max_blocks(1024, 64)
    tokens = 1024 * min(
        pool.num_blocks / each for pool, each in zip(sized.pools, per_pool, strict=True)
    )
    ideal = 1024 * memory / sum(one.max_blocks(1024, 64) * one.page_bytes for one in specs)
    assert 0.95 * ideal < tokens <= ideal


class StateSpec(KVCacheSpec, frozen=True, kw_only=True, tag="state"):
    """A recurrent state: one block of a sequence of any length."""

    grows = False

    @property
    def page_bytes(self) -> int:
        return 4096


@pytest.mark.parametrize("pattern", ["SFSF", "FSFS", "SSSSSSSF", "FF", "S", "FO", "OF"])
@pytest.mark.parametrize("num_kv_blocks", [32, 100])
def test_num_kv_blocks_are_those_of_what_grows(pattern, num_kv_blocks):
    """In a hybrid, too, whatever comes first: and there are states for as many sequences as may
    run."""
    kinds = {"S": StateSpec(block_size=512), "F": spec(), "O": spec(heads=4)}
    planned = plan(*(kinds[kind] for kind in pattern))
    config = VllmConfig.default(
        max_model_len=512, max_num_seqs=8, num_kv_blocks=num_kv_blocks, enable_prefix_caching=False
    )
    sized = size_kv_cache(planned, config, 2**40, 0)
    of_kind = {group.spec.kind: sized.pools[group.pool].num_blocks for group in sized.groups}
    if "F" in pattern:
        assert of_kind["full"] == num_kv_blocks
        assert of_kind.get("state", 8) == 8
    else:
        assert of_kind["state"] == min(num_kv_blocks, 8), "no more than could run"


def test_a_config_survives_the_wire():
    planned = plan(spec(), spec(8), spec(heads=4)).sized([3, 4], [0, 1])
    message = msgspec.Raw(msgspec.msgpack.encode(planned))
    assert KVCacheConfig.decode(message, Plugins.load().kv_kinds) == planned


@pytest.mark.parametrize(
    ("window", "tokens", "chunk", "most"),
    [(None, 100, 8, 7), (16, 100, 1, 2), (16, 100, 16, 3), (16, 10, 100, 1), (1, 100, 1, 2)],
)
def test_blocks_of_a_sequence_are_bounded_by_its_window(window, tokens, chunk, most):
    assert spec(window).max_blocks(tokens, chunk) == most


class Kept(KVCacheSpec, frozen=True, kw_only=True, tag="kept"):
    """One block, which every step writes."""

    caches_prefixes: ClassVar[bool] = False

    @property
    def page_bytes(self) -> int:
        return 64


class CrossKept(Kept, frozen=True, kw_only=True, tag="cross_kept"):
    of_encoder: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("kept", "shares"),
    [
        (spec(), True),
        (spec(16), True),
        (msgspec.structs.replace(spec(), lag=1), True),
        (Kept(block_size=64), False),
        (Kept(block_size=64, snapshots=16), True),
        (Kept(block_size=64, snapshots=16, lag=1), False),
        (CrossKept(block_size=64), True),
    ],
)
def test_a_group_without_prefixes_is_named(kept, shares):
    """An engine that is told to cache prefixes refuses it, and all others do without."""
    planned = plan(spec(), kept)
    without = planned.without_prefixes
    assert (without is None) == shares
    if without is not None:
        assert without.layers == ["layers.1"]
    sizes = [4] * len(planned.pools)
    assert BlockManager(planned.sized(sizes, sizes)).caches_prefixes == shares
