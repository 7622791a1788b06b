"""BlockManager by itself: tables, forks, swaps and cached contents, against a memory that tells
lies apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_engine import Groups, check_blocks, kv_cache
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import BlockManager, TokenRange
from toolkit_lm.kv.prefix import PrefixHashes
from toolkit_lm.kv.snapshots import Snapshots
from toolkit_lm.messages import BlockCopy, StepPlan
from toolkit_lm.scheduler import Planners
from toolkit_lm.scheduler.preemption import PreemptionCost
from toolkit_lm.scheduler.request_blocks import Admitted, RequestBlocks

CHUNK = 6
LAYOUTS: list[Groups] = [
    [(2, None)],
    [(4, None), (3, None, 1)],
    [(2, None), (4, 5)],
    [(2, None), (4, 5, 1), (3, None)],
    [(2, None), (2, None, 0, 1), (4, None, 1, 3)],
    [(4, None), (2, 5, 0, 2)],
    [(2, "snapshots")],
    [(2, None), (3, "snapshots", 1)],
    [(2, None), (4, 5, 1), (2, "often"), (1, "snapshots", 1)],
]
"""KV groups: block size, window or kind, pool, lag."""
STATES = ("state", "often")


def make_blocks(num_blocks: int, layout: Groups, host_blocks: int = 0) -> BlockManager:
    num_pools = 1 + max(group[2] if len(group) > 2 else 0 for group in layout)
    return BlockManager(kv_cache([num_blocks] * num_pools, layout, host_blocks))


class Line:
    """A sequence: its tokens, how many of them are computed, and its request."""

    def __init__(self, request_id: str, tokens: list[int], computed: int = 0) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.computed = computed

    def block_hashes(self, block_size: int, num_blocks: int) -> list[bytes]:
        return PrefixHashes("").block_hashes(self.tokens, block_size, num_blocks)


class BlockMachine(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        num_blocks=st.integers(8, 30),
        host_blocks=st.sampled_from([0, 3, 30]),
    )
    def start(self, layout, num_blocks, host_blocks):
        self.blocks = make_blocks(num_blocks, layout, host_blocks)
        self.snapshots = Snapshots(self.blocks)
        self.device: list[list[dict[int, object]]] = [
            [{} for _ in range(num_blocks)] for _ in self.blocks.pools
        ]
        self.host: list[list[dict[int, object]]] = [
            [{} for _ in range(host_blocks)] for _ in self.blocks.pools
        ]
        self.lines: dict[int, Line] = {}
        self.swapped: set[str] = set()
        self.count = 0

    def seq_ids(self, request_id: str) -> list[int]:
        return [seq_id for seq_id, line in self.lines.items() if line.request_id == request_id]

    def groups(self):
        return [(group.index, group.spec, group.pool_index) for group in self.blocks.groups]

    def apply(self, copies: list[BlockCopy], source, target) -> None:
        for copy in copies:
            pool = self.blocks.groups[copy.group].pool_index
            target[pool][copy.target] = dict(source[pool][copy.source])

    def pick(self, data) -> int:
        return data.draw(
            st.sampled_from(
                [s for s, line in self.lines.items() if line.request_id not in self.swapped]
            )
        )

    @property
    def can_pick(self) -> bool:
        return any(line.request_id not in self.swapped for line in self.lines.values())

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def begin(self, tokens):
        """A request: it finds what is cached."""
        self.count += 1
        line = Line(f"r{self.count}", tokens)
        self.lines[self.count] = line
        found = self.blocks.find_prefix(line.block_hashes, len(tokens) - 1)
        assert 0 <= found < len(tokens)
        if found:
            self.blocks.adopt(self.count, line.block_hashes, found)
            line.computed = found

    @precondition(lambda self: self.can_pick)
    @rule(data=st.data(), num_tokens=st.integers(1, CHUNK), drawn=st.integers(0, 1))
    def write(self, data, num_tokens, drawn):
        seq_id = self.pick(data)
        line = self.lines[seq_id]
        if line.computed == len(line.tokens):
            line.tokens.append(drawn)
        write = TokenRange(seq_id, line.computed, min(line.computed + num_tokens, len(line.tokens)))
        self.blocks.trim(seq_id, line.computed)
        needed = self.blocks.blocks_needed([write])
        free = [pool.num_free for pool in self.blocks.pools]
        if not self.blocks.has_free(needed):
            assert any(one > there for one, there in zip(needed, free, strict=True))
            return
        stop = self.snapshots.next_stop(write.start, len(line.tokens))
        write = write._replace(end=min(write.end, stop or write.end))
        needed = self.blocks.blocks_needed([write])
        plan = StepPlan()
        self.snapshots.keep(write, len(line.tokens), line.block_hashes, plan, [write])
        kept = len(plan.copies)
        free = [pool.num_free for pool in self.blocks.pools]
        assert self.blocks.blocks_needed([write]) == needed
        assert self.blocks.has_free(needed), "a snapshot has taken what a sequence needs"
        new_blocks = self.blocks.append_slots(write, plan)
        assert [pool.num_free for pool in self.blocks.pools] == [
            there - one for one, there in zip(needed, free, strict=True)
        ]
        assert sum(needed) == sum(map(len, new_blocks)) + len(plan.copies) - kept
        self.snapshots.release()
        self.apply(plan.copies, self.device, self.device)
        for group, spec, pool in self.groups():
            table = self.blocks.get_block_table(seq_id, group)
            if spec.kind in STATES:
                assert self.blocks.pools[pool].ref_counts[table[0]] == 1
                if write.start:
                    assert self.device[pool][table[0]][0] == (group, *line.tokens[: write.start])
                self.device[pool][table[0]][0] = (group, *line.tokens[: write.end])
                continue
            lag = spec.lag
            for position in range(max(0, write.start - lag), write.end):
                block = table[position // spec.block_size]
                assert self.blocks.pools[pool].ref_counts[block] == 1, (
                    "somebody else's block is written"
                )
                if position < write.end - lag:
                    self.device[pool][block][position % spec.block_size] = (
                        group,
                        *line.tokens[: position + lag + 1],
                    )
        line.computed = write.end
        self.blocks.publish(seq_id, line.block_hashes, line.computed)

    @precondition(lambda self: self.can_pick)
    @rule(data=st.data(), back=st.integers(0, 3), drawn=st.integers(0, 1))
    def fork(self, data, back, drawn):
        """Forks at the first tokens, as far as a window still holds them."""
        parent = self.pick(data)
        line = self.lines[parent]
        # A state can be shared where it stands, and nowhere else.
        states = any(spec.kind in STATES for _, spec, _ in self.groups())
        shared = line.computed - (0 if states else back)
        gone = any(
            None
            in self.blocks.get_block_table(parent, group)[
                spec.first_needed(max(0, shared - spec.lag)) :
            ]
            for group, spec, _ in self.groups()
        )
        if shared > 0 and not gone:
            self.count += 1
            used = self.blocks.num_used
            self.blocks.fork(parent, self.count, shared)
            assert self.blocks.num_used == used
            self.lines[self.count] = Line(line.request_id, [*line.tokens[:shared], drawn], shared)

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def free(self, data):
        seq_id = data.draw(st.sampled_from(sorted(self.lines)))
        request_id = self.lines.pop(seq_id).request_id
        self.blocks.free(seq_id)
        self.blocks.free(seq_id)
        assert self.blocks.get_block_table(seq_id) == []
        if not self.seq_ids(request_id):
            self.swapped.discard(request_id)

    @precondition(lambda self: self.can_pick)
    @rule(data=st.data())
    def swap_out(self, data):
        request_id = self.lines[self.pick(data)].request_id
        seq_ids = self.seq_ids(request_id)
        entries = [
            (g.pool_index, entry)
            for g, table in self.blocks._tables_of(seq_ids)
            for entry in table
            if entry is not None
        ]
        own = {
            entry
            for entry in entries
            if self.blocks.pools[entry[0]].ref_counts[entry[1]] == entries.count(entry)
        }
        used = self.blocks.num_used
        assert self.blocks.num_own_bytes(seq_ids) == sum(
            self.blocks.config.pools[pool].block_bytes for pool, _ in own
        )
        copies = self.blocks.swap_out(seq_ids)
        if copies is None:
            assert any(
                sum(pool == i for pool, _ in own) > host.num_free
                for i, host in enumerate(self.blocks.host_pools)
            )
            return
        assert {(self.blocks.groups[copy.group].pool_index, copy.source) for copy in copies} == own
        assert self.blocks.num_used == used - len(own)
        self.apply(copies, self.device, self.host)
        self.swapped.add(request_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.swapped)))
        seq_ids = self.seq_ids(request_id)
        needed = self.blocks.num_swapped(seq_ids)
        used = self.blocks.num_used
        if self.blocks.has_free(needed):
            copies = self.blocks.swap_in(seq_ids)
            assert len(copies) == sum(needed) == self.blocks.num_used - used
            self.apply(copies, self.host, self.device)
            self.swapped.discard(request_id)

    @rule()
    def reset(self):
        self.blocks.reset()
        assert (self.blocks.num_used, self.blocks.num_used_on_host) == (0, 0)
        self.lines.clear()
        self.swapped.clear()
        for token in (0, 1):
            assert self.blocks.find_prefix(Line("", [token] * 16).block_hashes, 16) == 0

    @invariant()
    def tables_hold_what_they_should(self):
        check_blocks(self.blocks)
        for seq_id, line in self.lines.items():
            for group, spec, pool in self.groups():
                table = self.blocks.get_block_table(seq_id, group)
                state = spec.kind in STATES
                held = min(line.computed, 1) if state else line.computed - spec.lag
                first = max(0, held - spec.window + 1) if spec.kind == "window" else 0
                for position in range(first, held):
                    entry = table[position // spec.block_size]
                    offset = position % spec.block_size
                    kept = (
                        self.device[pool][entry]
                        if isinstance(entry, int)
                        else self.host[pool][entry.id]
                    )
                    end = line.computed if state else position + spec.lag + 1
                    assert kept[offset] == (group, *line.tokens[:end])


BlockMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestBlockManager = BlockMachine.TestCase


def test_a_fork_does_not_write_into_a_block_that_is_found_as_its_parents():
    blocks = make_blocks(8, [(4, None)])
    parent = Line("r", [1, 2, 3, 4, 5, 6, 7, 8])
    blocks.append_slots(TokenRange(0, 0, 8), StepPlan())
    blocks.publish(0, parent.block_hashes, 8)
    blocks.fork(0, 1, 5)
    blocks.free(0)
    assert blocks.find_prefix(parent.block_hashes, 8) == 8
    # The fork is the only owner now: it need not copy, but what it writes is no more what the
    # parent wrote.
    blocks.append_slots(TokenRange(1, 5, 7), plan := StepPlan())
    assert plan.copies == []
    assert blocks.find_prefix(parent.block_hashes, 8) == 4


def test_a_block_that_nobody_knows_is_taken_before_one_that_somebody_may_want():
    blocks = make_blocks(4, [(2, None)])
    known = Line("a", [1, 2])
    unknown = Line("b", [3, 4])
    blocks.append_slots(TokenRange(0, 0, 2), StepPlan())
    blocks.publish(0, known.block_hashes, 2)
    blocks.append_slots(TokenRange(1, 0, 2), StepPlan())
    blocks.free(0)
    blocks.free(1)
    blocks.append_slots(TokenRange(2, 0, 6), StepPlan())
    assert blocks.find_prefix(known.block_hashes, 2) == 2
    assert blocks.find_prefix(unknown.block_hashes, 2) == 0
    blocks.append_slots(TokenRange(2, 6, 8), StepPlan())
    assert blocks.find_prefix(known.block_hashes, 2) == 0


def test_double_allocation_is_refused():
    blocks = make_blocks(4, [(2, None)])
    blocks.append_slots(TokenRange(0, 0, 2), StepPlan())
    blocks.append_slots(TokenRange(1, 0, 1), StepPlan())
    with pytest.raises(AssertionError, match="holds blocks already"):
        blocks.fork(0, 1, 1)


def test_windows_move_on_the_host():
    """Tokens that were drafts when a request gave way may have been verified when it comes back."""
    blocks = make_blocks(12, [(2, None), (2, 4)], host_blocks=12)
    blocks.append_slots(TokenRange(0, 0, 10), StepPlan())
    blocks.trim(0, 6)
    assert blocks.get_block_table(0, 1)[:2] == [None, blocks.get_block_table(0, 1)[1]]
    assert len(blocks.swap_out([0])) == blocks.num_used_on_host == 9
    request = SimpleNamespace(
        swapped=True, seq_ids=[0], unfinished=[SimpleNamespace(seq_id=0, num_kept_tokens=9)]
    )
    cost = PreemptionCost("swap", blocks.config)
    copies = RequestBlocks(VllmConfig.default(), blocks, cost, None, Planners()).admit(
        request, Admitted()
    )
    assert (len(copies), blocks.num_used, blocks.num_used_on_host, request.swapped) == (
        7,
        7,
        0,
        False,
    )
    assert blocks.get_block_table(0, 1)[:3] == [None] * 3
    check_blocks(blocks)


def test_a_prefix_ends_where_all_groups_have_it():
    """A group with a lag of one token fills a block one token later, and finds it by the tokens
    that it depends on. It writes the last token of a prefix again, in a block of its own."""
    blocks = make_blocks(12, [(2, None), (2, None, 0, 1)])
    line = Line("a", [1, 2, 3, 4, 5, 6, 7])
    found = []
    for end in (4, 6):
        blocks.append_slots(TokenRange(0, 0 if end == 4 else 4, end), StepPlan())
        blocks.publish(0, line.block_hashes, end)
        found.append(blocks.find_prefix(line.block_hashes, 6))
    assert found == [2, 4]
    assert blocks.num_shared(line.block_hashes, 4) == [3]
    blocks.adopt(1, line.block_hashes, 4)
    assert blocks.blocks_needed([TokenRange(1, 4, 5)]) == [3]
    blocks.append_slots(TokenRange(1, 4, 5), plan := StepPlan())
    assert [(copy.group, copy.source) for copy in plan.copies] == [
        (1, blocks.get_block_table(0, 1)[1])
    ]
    assert blocks.get_block_table(1, 0)[:2] == blocks.get_block_table(0, 0)[:2]
