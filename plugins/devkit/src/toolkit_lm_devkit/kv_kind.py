"""KVKindConformance: what every kind of KV cache spec must do."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from toolkit_lm.attention import CacheBackend
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec, plan_groups
from toolkit_lm.plugin import Plugins

from toolkit_lm_devkit.conformance import Conformance

_FAR = 2**30
"""More tokens than any sequence has."""


class KVKindConformance(Conformance):
    """Subclass it as `class TestMine(KVKindConformance)`, name a spec of the kind, and more in
    `variants`.

    The distribution that registers the kind must be installed, or its plugin stand in `plugins`.
    Blocks are those of the scheduler: it gives a sequence the blocks of the tokens of a step, and
    takes back those before `first_needed` when it plans the next step.
    """

    spec: ClassVar[KVCacheSpec]
    variants: ClassVar[Sequence[KVCacheSpec]] = ()
    """Specs of other values: of another block size, say, and one for each further field."""
    backend: ClassVar[type[CacheBackend] | None] = None
    """The class that lays tensors into a page. None: that is not tested."""
    plugins: ClassVar[Sequence[object]] = ()
    """Plugins that are not installed."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        specs = (
            {f"{index}": spec for index, spec in enumerate([cls.spec, *cls.variants])}
            if hasattr(cls, "spec")
            else {}
        )
        return {"case": specs, "laid_out": specs if cls.backend else {}}

    # A value, which processes exchange

    def test_a_spec_is_a_value(self, case: KVCacheSpec) -> None:
        """Layers with equal specs form a group."""
        with pytest.raises(AttributeError):
            case.block_size = case.block_size + 1  # type: ignore[misc]
        same = msgspec.structs.replace(case)
        assert case == same, "a copy is not equal: has the class eq=False?"
        assert hash(case) == hash(same), "a copy has another hash"

    def test_specs_of_other_values_differ(self) -> None:
        specs = [self.spec, *self.variants]
        assert len(set(specs)) == len(specs), f"of {specs} some are equal"

    def test_it_crosses_processes(self, case: KVCacheSpec) -> None:
        """The tag says which registered class it is."""
        config = plan_groups({"layer": case}, {"layer": "backend"})
        message = msgspec.Raw(msgspec.msgpack.encode(config))
        [group] = KVCacheConfig.decode(message, Plugins.load(extra=self.plugins).kv_kinds).groups
        found = type(group.spec).__name__
        expected = type(case).__name__
        assert type(group.spec) is type(case), (
            f"what is registered as {case.kind!r} is {found}, not {expected}: give the class "
            "its own tag"
        )
        assert group.spec == case, f"{case} comes out as {group.spec}"

    def test_its_module_needs_no_torch(self) -> None:
        """The front process reads specs, and imports no torch."""
        module = type(self.spec).__module__
        code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
        )  # nosec B603 # our own words
        assert done.returncode == 0, done.stderr or f"{module} imports torch"

    def test_its_traits_are_booleans(self, case: KVCacheSpec) -> None:
        for name in ("caches_prefixes", "forks_anywhere", "shared_within_step", "grows"):
            value = getattr(case, name)
            assert isinstance(value, bool), f"{name} is {value!r}, which is neither True nor False"
        assert _is_count(case.lag), f"lag is {case.lag!r}, which is no number of tokens"
        assert _is_count(case.rewinds), f"rewinds is {case.rewinds!r}, which is no number of tokens"

    # Snapshots

    def test_snapshots_are_kept_at_borders(self, case: KVCacheSpec) -> None:
        """Steps of a prompt end where the spec says, and a cached prefix can end there."""
        if not case.snapshots:
            return
        assert not case.caches_prefixes, (
            "snapshots are for kinds of which no block serves others: caches_prefixes is True"
        )
        assert not case.lag, "what trails keeps no snapshots: lag is not 0"
        for border in (case.snapshots, 2 * case.snapshots):
            for prompt in (1, border, border + 1, 3 * border, 3 * border + 2):
                start = 0
                while stop := case.stops_at(start, prompt, border):
                    assert start < stop <= prompt, (
                        f"stops_at({start}, {prompt}, {border}) is {stop}, which the step does "
                        "not reach"
                    )
                    assert stop % border == 0, (
                        f"stops_at({start}, {prompt}, {border}) is {stop}, which is no border"
                    )
                    start = stop
        length = 16 * case.snapshots
        assert case.stops_at(0, length + 1, case.snapshots), "no snapshot is ever kept"

    # A page

    def test_a_page_has_bytes(self, case: KVCacheSpec) -> None:
        assert _is_count(case.page_bytes), (
            f"page_bytes is {case.page_bytes!r}, which is no number of bytes"
        )
        assert case.page_bytes > 0, "a page has no bytes"

    def test_page_layout_fills_the_page(self, laid_out: KVCacheSpec) -> None:
        assert self.backend is not None
        layout = self.backend.page_layout(laid_out)
        filled = sum(
            torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta").nbytes
            for tensor in layout
        )
        assert filled == laid_out.page_bytes, (
            f"the tensors of a page have {filled} bytes, and the page {laid_out.page_bytes}"
        )

    # The blocks of a sequence

    def test_a_table_covers_all_tokens(self, case: KVCacheSpec) -> None:
        for tokens in _lengths(case):
            found = case.num_blocks(tokens)
            expected = -(-tokens // case.block_size)
            assert found == expected, (
                f"num_blocks({tokens}) is {found}, but the table has {expected} entries"
            )

    def test_what_is_given_back_is_not_needed_again(self, case: KVCacheSpec) -> None:
        before = 0
        for tokens in (*_lengths(case), _FAR):
            first = case.first_needed(tokens)
            own = tokens // case.block_size
            assert _is_count(first), (
                f"first_needed({tokens}) is {first!r}, which is no index of a table"
            )
            assert first >= before, (
                f"first_needed({tokens}) is {first}, but {before} for fewer tokens"
            )
            assert first <= own, (
                f"first_needed({tokens}) is {first}, but the next token is in block {own}"
            )
            before = first

    def test_max_blocks_is_monotone(self, case: KVCacheSpec) -> None:
        for chunk in _chunks(case):
            before = 0
            for tokens in _lengths(case):
                most = case.max_blocks(tokens, chunk)
                assert _is_count(most), (
                    f"max_blocks({tokens}, {chunk}) is {most!r}, which is no number of blocks"
                )
                assert most >= before, (
                    f"max_blocks({tokens}, {chunk}) is {most}, but {before} for fewer tokens"
                )
                assert most <= case.num_blocks(tokens), (
                    f"max_blocks({tokens}, {chunk}) is {most}, but the table has fewer entries"
                )
                before = most
        for tokens in _lengths(case):
            found = [case.max_blocks(tokens, chunk) for chunk in _chunks(case)]
            assert found == sorted(found), (
                f"max_blocks({tokens}, chunk) is {found} for the growing chunks {_chunks(case)}"
            )

    def test_max_blocks_are_enough(self, case: KVCacheSpec) -> None:
        """However the tokens of a sequence are cut into steps."""
        total = min(max(8 * case.block_size, 256), 4096)
        for chunk in _chunks(case):
            for steps in _courses(total, chunk):
                for tokens, held in _held(case, steps):
                    most = case.max_blocks(tokens, chunk)
                    assert held <= most, (
                        f"max_blocks({tokens}, {chunk}) is {most}, but a sequence in such "
                        f"steps holds {held} blocks"
                    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _lengths(spec: KVCacheSpec) -> list[int]:
    """Numbers of tokens of sequences: small ones, and those about the edges of blocks."""
    return sorted(
        {
            *range(130),
            *(edge * spec.block_size + tokens for edge in range(1, 9) for tokens in (-1, 0, 1)),
        }
    )


def _chunks(spec: KVCacheSpec) -> list[int]:
    """Numbers of tokens of steps."""
    size = spec.block_size
    return sorted({1, 2, size - 1, size, size + 1, 3 * size + 2, 100} - {0})


def _courses(total: int, chunk: int) -> Iterator[list[int]]:
    """How `total` tokens are cut into steps of at most `chunk`: whole chunks after a first one of
    any size, and steps of any sizes."""
    for first in sorted({1, chunk // 2 + 1, chunk}):
        yield [first, *[chunk] * (total // chunk)]
    draw = random.Random(chunk)  # nosec B311 # it keeps no secret
    yield [draw.randint(1, chunk) for _ in range(2 * total // (chunk + 1) + 1)]


def _held(spec: KVCacheSpec, steps: Iterable[int]) -> Iterator[tuple[int, int]]:
    """After each step of a sequence: its tokens, and the most blocks that it has held at a time."""
    computed = most = 0
    blocks: set[int] = set()
    for step in steps:
        first = spec.first_needed(computed)
        end = computed + step
        blocks = {block for block in blocks if block >= first} | {
            *range(computed // spec.block_size, -(-end // spec.block_size))
        }
        computed, most = end, max(most, len(blocks))
        yield computed, most
