"""Random requests, aborts, deadlines, failures and tiny pools, through EngineCore; the invariants
are checked after every step."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from unittest import mock

import numpy as np
from fake_engine import (
    ENCODER_INPUTS,
    MAX_ENCODER_LEN,
    NAN,
    POISON,
    FakeCore,
    check_blocks,
    kv_cache,
    next_token,
)
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine.core import _MOST_FAILURES
from toolkit_lm.errors import RequestError
from toolkit_lm.kv import BlockManager
from toolkit_lm.kv.group_blocks import Entry, Location
from toolkit_lm.messages import (
    Array,
    BlockCopy,
    CacheKey,
    EncoderInput,
    EngineRequest,
    MultiModalFeatureSpec,
    PlaceholderRange,
    SequenceInputs,
)
from toolkit_lm.params import SamplingParams
from toolkit_lm.scheduler import scheduler as scheduler_module

MAX_MODEL_LEN = 20
GROUPS = [
    [(1, None)],
    [(4, None)],
    [(3, None)],
    [(4, None), (2, None)],
    [(2, 5)],
    [(3, 1)],
    [(2, None), (2, 4), (2, 4)],
]
GROUPS += [[(8, None)], [(8, None), (4, 5)]]
GROUPS += [
    [(2, "late")],
    [(2, ("late", 3))],
    [(2, None), (3, "late")],
    [(2, "state")],
    [(2, None), (1, "state", 1)],
    [(2, None), (3, 4, 1), (1, "state", 2), (2, None)],
]
GROUPS += [
    [(2, "snapshots")],
    [(1, "often")],
    [(2, None), (3, "snapshots", 1)],
    [(2, None), (2, "often")],
    [(2, None), (3, 4, 1), (2, "snapshots", 2), (1, "often", 2)],
]
GROUPS += [
    [(2, None), (2, "cross")],
    [(3, None), (2, "cross", 1)],
    [(4, 3), (2, "cross"), (3, "cross", 1)],
    [(2, "late"), (4, "cross")],
]
"""Of KV groups: block size, window or kind, pool."""
STATES = {"state", "snapshots", "often"}
OPENINGS = [[7 * (i + k) % NAN for i in range(MAX_MODEL_LEN)] for k in (0, 0, 1)]
"""Beginnings of prompts: many share a prefix."""

REQUEST = st.fixed_dictionaries(
    {
        "opening": st.sampled_from(OPENINGS),
        "shared": st.one_of(st.integers(0, 9), st.integers(0, MAX_MODEL_LEN)),
        "tail": st.lists(st.integers(0, NAN - 1), max_size=4),
        "bad": st.sampled_from([None] * 20 + [NAN, POISON]),
        "n": st.sampled_from([1, 1, 2, 4]),
        "max_tokens": st.one_of(st.none(), st.none(), st.integers(1, 12)),
        "eos": st.lists(st.integers(0, POISON), max_size=3),
        "ignore_eos": st.booleans(),
        "priority": st.integers(-2, 2),
        "keyed": st.sampled_from([None, None, 0, 5]),
        "encoded": st.sampled_from([0, 0, 1, 2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "patience": st.sampled_from([None] * 9 + [-1, 3, 9]),
        "media": st.lists(
            st.tuples(st.integers(0, 3), st.integers(1, 7), st.sampled_from("ab"), st.booleans()),
            max_size=3,
        ),
    }
)


def media_in(
    prompt: list[int], media: list[tuple[int, int, str, bool]]
) -> list[MultiModalFeatureSpec]:
    """Items with gaps before them, as far as they fit into the prompt. For some, the first token is
    not replaced by an embedding."""
    features = []
    end = 0
    for gap, length, name, masked in media:
        start, end = end + gap, end + gap + length
        if end > len(prompt):
            break
        mask = [False] + [True] * (length - 1) if masked else None
        place = PlaceholderRange(start, length, mask)
        data = {"embeds": Array.of(np.zeros((place.num_embeds, 1), np.float32))}
        identifier = f"{name} {length} {masked}"
        features.append(
            MultiModalFeatureSpec(
                modality="image", mm_identifier=identifier, mm_position=place, data=data
            )
        )
    return features


class CheckedBlocks(BlockManager):
    """Holds each call to the equations of what it moves and releases. An entry of a table is named
    with its pool."""

    def swap_out(self, seq_ids) -> list[BlockCopy] | None:
        # Exactly those whose reference count reaches zero when the request's references go.
        moved = self._unshared(seq_ids)
        before = self._used()
        copies = super().swap_out(seq_ids)
        if copies is None:
            assert any(
                sum(pool == i for pool, _ in moved) > host.num_free
                for i, host in enumerate(self.host_pools)
            )
            assert self._used() == before
        else:
            assert sorted(
                (self.groups[copy.group].pool_index, copy.source) for copy in copies
            ) == sorted(moved)
            assert len(
                {(self.groups[copy.group].pool_index, copy.target) for copy in copies}
            ) == len(moved)
            assert self._used() == (before[0] - len(moved), before[1] + len(moved))
        return copies

    def swap_in(self, seq_ids) -> list[BlockCopy]:
        hosted = {entry for entry in self._entries(seq_ids) if isinstance(entry[1], Location)}
        needed = self.num_swapped(seq_ids)
        before = self._used()
        copies = super().swap_in(seq_ids)
        assert len(copies) == sum(needed) == len(hosted)
        assert self._used() == (before[0] + len(hosted), before[1] - len(hosted))
        assert all(not isinstance(entry, Location) for _, entry in self._entries(seq_ids))
        return copies

    def free(self, seq_id) -> None:
        last = [
            entry
            for group, table in self._tables_of([seq_id])
            for entry in table
            if entry is not None and group._owners(entry) == 1
        ]
        before = self._used()
        super().free(seq_id)
        assert self._used() == (
            before[0] - sum(isinstance(e, int) for e in last),
            before[1] - sum(isinstance(e, Location) for e in last),
        )

    def _entries(self, seq_ids) -> list[tuple[int, Entry]]:
        return [
            (group.pool_index, entry)
            for group, table in self._tables_of(seq_ids)
            for entry in table
        ]

    def _unshared(self, seq_ids) -> list[tuple[int, Entry]]:
        counts = Counter(entry for entry in self._entries(seq_ids) if isinstance(entry[1], int))
        return [
            entry
            for entry, count in counts.items()
            if self.pools[entry[0]].ref_counts[entry[1]] == count
        ]

    def _used(self) -> tuple[int, int]:
        return self.num_used, self.num_used_on_host


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        spare=st.integers(0, 8),
        host_blocks=st.sampled_from([0, 0, 2, 5, 40]),
        groups=st.sampled_from(GROUPS),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(0, 24),
        policy=st.sampled_from(["fcfs", "priority", "unruly"]),
        caching=st.booleans(),
        mode=st.sampled_from(["recompute", "swap", "auto"]),
        blocks_per_token=st.floats(0.1, 2),
        max_in_flight=st.integers(1, 3),
        stages=st.integers(1, 2),
        drafts=st.sampled_from(["none", "drafter", "budget", "processors"]),
        most_embeds=st.sampled_from([4, 7, 12, 100]),
        whole_items=st.booleans(),
    )
    def start(
        self,
        spare,
        host_blocks,
        groups,
        max_num_seqs,
        budget,
        policy,
        caching,
        mode,
        blocks_per_token,
        max_in_flight,
        stages,
        drafts,
        most_embeds,
        whole_items,
    ):
        self.encodes = any(group[1] == "cross" for group in groups)
        most_encoded = MAX_ENCODER_LEN if self.encodes else None
        budget += most_encoded or 0
        config = VllmConfig.default(
            max_model_len=MAX_MODEL_LEN,
            max_encoder_len=most_encoded,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            scheduling_policy=policy,
            enable_prefix_caching=caching,
            preemption_mode=mode,
            pipeline_parallel_size=stages,
            encoder_cache_memory=f"{4 * 4096 * most_embeds}",
            # A state cannot go back by the tokens that were not drawn.
            drafter="guess"
            if drafts in ("drafter", "budget") and not {group[1] for group in groups} & STATES
            else None,
            draft_budget="auto" if drafts == "budget" else "all",
        )
        num_pools = 1 + max(group[2] if len(group) > 2 else 0 for group in groups)
        least = kv_cache([0] * num_pools, groups).max_blocks(
            MAX_MODEL_LEN, max_num_seqs + budget, most_encoded or 0
        )
        num_blocks = [count + spare for count in least]
        self.now = 0.0
        self.clock = mock.patch.object(
            scheduler_module, "time", SimpleNamespace(monotonic=lambda: self.now)
        )
        self.clock.start()
        self.core = FakeCore(
            config,
            kv_cache(num_blocks, groups, host_blocks),
            max_in_flight,
            whole_items=whole_items,
        )
        # Drafts of processors come without an option, and are left out where they cannot be taken.
        self.core.executor.runner.drafting |= drafts == "processors"
        self.scheduler = self.core.scheduler
        self.scheduler.blocks.__class__ = CheckedBlocks
        # Measured times would not let "auto" choose the same each time.
        cost = self.scheduler.preemption
        cost.observe = lambda num_tokens, seconds: None
        cost._seconds_per_token = (
            2 * blocks_per_token * self.scheduler.blocks.config.pools[0].block_bytes / 4e9
        )
        if (budget := self.scheduler.draft_budget) is not None:
            observe = budget.observe
            budget.observe = lambda plan, count, _: observe(plan, count, 1 + plan.num_tokens / 8)
        self.messages: dict[str, EngineRequest] = {}
        self.outputs: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str, dict[int, str]] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.idle = 0

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=3))
    def add(self, requests):
        for request in requests:
            self.queue(**request)

    def queue(
        self,
        opening,
        shared,
        tail,
        bad,
        n,
        max_tokens,
        eos,
        ignore_eos,
        priority,
        keyed,
        encoded,
        prompt_logprobs,
        patience,
        media,
    ):
        prompt = [*opening[:shared], *tail, *([] if bad is None else [bad])]
        features = media_in(prompt, media)
        keys = [
            CacheKey(one.mm_position.offset, one.mm_position.end, one.mm_identifier)
            for one in features
        ]
        message = EngineRequest(
            request_id=f"r{len(self.messages)}",
            prompt_token_ids=prompt,
            params=SamplingParams(
                n=n,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                seed=keyed,
                prompt_logprobs=prompt_logprobs,
            ),
            eos_token_ids=eos,
            priority=priority,
            arrival_time=float(len(self.messages)),
            deadline=None if patience is None else self.now + patience,
            encoder=EncoderInput.of_tokens(ENCODER_INPUTS[encoded]) if self.encodes else None,
            inputs=SequenceInputs(second_text_start=encoded if self.encodes else None),
            features=features,
            cache_keys=keys if keyed is None else [*keys, CacheKey(keyed, keyed + 1, "a salt")],
        )
        try:
            self.core.add_request(message)
        except RequestError:
            blocks = self.scheduler.blocks
            most = [
                n * one
                for one in blocks.config.max_blocks(
                    MAX_MODEL_LEN, self.scheduler.max_num_batched_tokens, MAX_ENCODER_LEN
                )
            ]
            too_many = any(
                one > pool.num_blocks for one, pool in zip(most, blocks.pools, strict=True)
            )
            items = self.scheduler.items
            places = [one.mm_position for one in features]
            too_large = any(place.num_embeds > items.capacity for place in places)
            beside = len(ENCODER_INPUTS[encoded]) if self.encodes else 0
            too_long = items.whole_items and any(
                place.length + beside > self.scheduler.max_num_batched_tokens for place in places
            )
            ends_in_item = (
                items.whole_items and n > 1 and places[-1:] and places[-1].end == len(prompt)
            )
            too_many |= (
                too_large
                or too_long
                or bool(ends_in_item and not self.scheduler.blocks.forks_anywhere)
            )
            assert (
                not prompt
                or len(prompt) >= MAX_MODEL_LEN
                or n > self.scheduler.max_num_seqs
                or too_many
            )
        else:
            self.messages[message.request_id] = message
            self.outputs[message.request_id] = {i: [] for i in range(n)}
            self.reasons[message.request_id] = {}
            self.prompt_logprobs[message.request_id] = []

    @rule(data=st.data(), kind=st.sampled_from(["abort"] * 4 + ["reset", "before", "after"]))
    def disturb(self, data, kind):
        if kind == "reset":
            self.core.reset_prefix_cache()
        elif kind != "abort" and not self.scheduler.quarantine.quarantined:
            # The next step fails, once. The last of `_MOST_FAILURES` in a row would end the engine:
            # aborts may have left no step in between that succeeds.
            if self.core._failures + 1 < _MOST_FAILURES:
                self.core.executor.transient = kind
        elif live := sorted(self.scheduler.roster.requests):
            request_id = data.draw(st.sampled_from(live))
            index = data.draw(
                st.one_of(st.none(), st.integers(0, self.messages[request_id].params.n - 1))
            )
            self.core.finish(request_id, "abort", index)
            for i in self.outputs[request_id] if index is None else [index]:
                self.reasons[request_id].setdefault(i, "abort")

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.one_step()

    def one_step(self):
        if not self.core.has_unfinished:
            return
        executor = self.core.executor
        if self.scheduler.quarantine.quarantined:
            # A hiccup that was to come before a real failure: of a request that computes alone it
            # would be taken for its own.
            executor.transient = None
        planned = len(executor.plans)
        news = self.core.step()
        self.now += 1
        executor.check_last_plan()
        assert len(self.core._in_flight) < self.core.executor.max_in_flight
        for plan in executor.plans[planned:]:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
            assert len(plan.scheduled) <= self.scheduler.max_num_seqs
            assert len({s.seq_id for s in plan.scheduled}) == len(plan.scheduled)
        self.idle = (
            0
            if any(plan.scheduled for plan in executor.plans[planned:])
            or self.core._in_flight
            or news.outputs
            else self.idle + 1
        )
        assert self.idle < 4, "there is work to do, and nothing is done"
        for output in news.outputs:
            self.take(output)

    def take(self, output):
        assert output.index not in self.reasons[output.request_id], "an ended sequence got a token"
        self.outputs[output.request_id][output.index] += output.token_ids
        self.prompt_logprobs[output.request_id] += [
            entry.token_ids[0] for entry in output.prompt_logprobs
        ]
        assert output.num_cached_tokens < len(self.messages[output.request_id].prompt_token_ids)
        if output.finish_reason:
            self.reasons[output.request_id][output.index] = output.finish_reason
            assert (output.error is not None) == (output.finish_reason == "error")

    @invariant()
    def blocks_add_up(self):
        blocks = self.scheduler.blocks
        check_blocks(blocks)
        roster = self.scheduler.roster
        assert +roster.waits == Counter(one.waits.reason for one in roster.waiting)
        assert not roster.loading
        distinct: list[set[tuple[int, Entry]]] = []
        for request in self.scheduler.roster.requests.values():
            # Distinct blocks of a request = the union of its sequences' tables.
            distinct.append(
                {entry for entry in blocks._entries(request.seq_ids) if entry[1] is not None}
            )
            if request in self.scheduler.roster.waiting and not request.swapped:
                assert not distinct[-1], "a waiting request holds blocks"
            if request in self.scheduler.roster.running:
                assert all(isinstance(entry, int) for _, entry in distinct[-1]), (
                    "a running request's block is on the host"
                )
        every = set().union(*distinct)
        for index, (pool, host_pool) in enumerate(
            zip(blocks.pools, blocks.host_pools, strict=True)
        ):
            mine = [entry for i, entry in every if i == index]
            assert pool.num_free + sum(isinstance(entry, int) for entry in mine) == pool.num_blocks
            assert (
                host_pool.num_free + sum(isinstance(entry, Location) for entry in mine)
                == host_pool.num_blocks
            )
        for seq_id in blocks._tables:
            for group, table in blocks._tables_of([seq_id]):
                held = [b for b in table if b is not None]
                assert len(held) <= group.spec.max_blocks(
                    MAX_MODEL_LEN, self.scheduler.max_num_batched_tokens
                )
        assert self.scheduler.roster.num_running <= self.scheduler.max_num_seqs

    @invariant()
    def nothing_waiting_holds_items(self):
        running = {request.request_id for request in self.scheduler.roster.running}
        assert {name for name, held in self.scheduler.items._held.items() if held} <= running

    @invariant()
    def outputs_are_right(self):
        for request_id, outputs in self.outputs.items():
            expected, fails = self.expected(request_id)
            prompt = self.messages[request_id].prompt_token_ids
            assert (
                self.prompt_logprobs[request_id]
                == prompt[1 : 1 + len(self.prompt_logprobs[request_id])]
            )
            for index, tokens in outputs.items():
                reason = self.reasons[request_id].get(index)
                assert tokens == expected[: len(tokens)]
                if reason in ("stop", "length"):
                    assert tokens == expected
                    assert not fails
                elif reason == "error":
                    assert fails
                if (
                    reason in ("stop", "length")
                    and self.messages[request_id].params.prompt_logprobs is not None
                ):
                    assert self.prompt_logprobs[request_id] == prompt[1:]

    def expected(self, request_id: str) -> tuple[list[int], bool]:
        """Tokens that the request yields alone, and whether it then fails: the runner is greedy."""
        message = self.messages[request_id]
        params = message.params
        tokens = list(message.prompt_token_ids)
        first = len(tokens)
        most = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - first)
        eos = set() if params.ignore_eos else set(message.eos_token_ids)
        fails = bool({NAN, POISON} & set(tokens))
        while not fails and len(tokens) - first < most:
            tokens.append(next_token(tokens))
            if tokens[-1] in eos:
                break
            fails = tokens[-1] in (NAN, POISON) and len(tokens) - first < most
        return tokens[first:], fails

    def teardown(self):
        if hasattr(self, "core"):
            try:
                self.finish_all()
            finally:
                self.clock.stop()

    def finish_all(self):
        steps = 0
        while self.core.has_unfinished:
            self.one_step()
            self.blocks_add_up()
            steps += 1
            assert steps < 2000, "requests never end"
        self.outputs_are_right()
        for request_id, message in self.messages.items():
            assert set(self.reasons[request_id]) == set(range(message.params.n))
        blocks = self.scheduler.blocks
        runner = self.core.executor.runner
        assert (blocks.num_used, blocks.num_used_on_host) == (0, 0)
        assert (
            runner.items.keys() - self.scheduler.items._dropped
            == self.scheduler.items._sizes.keys()
        )
        runner.batch.apply(self.scheduler.drop_plan())
        assert not runner.batch.row_of, "the runner holds a sequence that has ended"
        assert not runner.batch.encoders.row_of, (
            "the runner holds an encoder sequence that has ended"
        )


SchedulerMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine = SchedulerMachine.TestCase
