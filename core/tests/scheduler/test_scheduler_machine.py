"""Random requests, aborts and tiny pools; the invariants are checked after every step."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from llm_toolkit.attention import KVCacheConfig, KVCacheSpec, KVGroup
from llm_toolkit.config import VllmConfig
from llm_toolkit.errors import RequestError
from llm_toolkit.messages import EngineRequest, StepPlan, StepResult
from llm_toolkit.params import SamplingParams
from llm_toolkit.runner import PersistentBatch
from llm_toolkit.scheduler import Scheduler
from llm_toolkit.scheduler.block_manager import NO_BLOCK

MAX_MODEL_LEN = 16
GROUPS = [[(1, None)], [(4, None)], [(3, None)], [(4, None), (2, None)], [(2, 5)], [(3, 1)], [(2, None), (2, 4), (2, 4)]]
"""Of KV groups: block size and window."""


def kv_cache(num_blocks: int, groups: list[tuple[int, int | None]]) -> KVCacheConfig:
    """Groups as (block size, window)."""
    specs = [
        KVCacheSpec(kind="full" if w is None else "window", block_size=size, num_kv_heads=1, head_size=8, dtype="float32", window=w)
        for size, w in groups
    ]
    return KVCacheConfig(num_blocks, [KVGroup(spec, "none", [f"layer{i}"]) for i, spec in enumerate(specs)])


class FakeRunner:
    """Runs plans on the real PersistentBatch. A cache slot holds the prefix of tokens up to its own position, as a tuple."""

    def __init__(self, max_num_seqs: int, max_model_len: int, groups: list[tuple[int, int | None]], num_blocks: int, vocab: int = 50):
        self.batch = PersistentBatch(max_num_seqs, max_model_len, [size for size, _ in groups])
        self.windows = [window for _, window in groups]
        # Groups of one block size share their memory.
        memory = {size: [[None] * size for _ in range(num_blocks)] for size, _ in groups}
        self.caches = [memory[size] for size, _ in groups]
        self.tokens: dict[int, list[int]] = {}
        self.vocab = vocab
        self.num_computed = 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.batch.apply(plan)
        for seq_id in plan.dropped:
            del self.tokens[seq_id]
        for copy in plan.copies:
            self.caches[copy.group][copy.target] = list(self.caches[copy.group][copy.source])
        for new in plan.new:
            self.tokens[new.seq_id] = list(new.token_ids)
        if not plan.scheduled:
            return StepResult(token_ids=[])
        inputs = self.batch.inputs(plan)
        self.num_computed += int(inputs.query_start[-1])
        self._write(plan, inputs)
        self._check_reads(plan, inputs)
        drawn = [[self.next_token(self.tokens[s.seq_id])] if s.samples else [] for s in plan.scheduled]
        for scheduled, tokens in zip(plan.scheduled, drawn, strict=True):
            self.tokens[scheduled.seq_id] += tokens
        rows = inputs.rows[inputs.sampling]
        self.batch.append_tokens(rows, [drawn[i][0] for i in inputs.sampling])
        return StepResult(token_ids=drawn)

    def next_token(self, tokens: list[int]) -> int:
        """Greedy: a function of the whole prefix."""
        return hash(tuple(tokens)) % self.vocab

    def _write(self, plan: StepPlan, inputs) -> None:
        for r, scheduled in enumerate(plan.scheduled):
            tokens = self.tokens[scheduled.seq_id]
            for t in range(inputs.query_start[r], inputs.query_start[r + 1]):
                position = int(inputs.positions[t])
                assert inputs.input_ids[t] == tokens[position]
                for group, size in enumerate(self.batch.block_sizes):
                    block, offset = divmod(int(inputs.slot_mappings[group][t]), size)
                    self.caches[group][block][offset] = (group, *tokens[: position + 1])

    def _check_reads(self, plan: StepPlan, inputs) -> None:
        for r, scheduled in enumerate(plan.scheduled):
            tokens, first = self.tokens[scheduled.seq_id], int(inputs.positions[inputs.query_start[r]])
            assert inputs.seq_lens[r] == inputs.positions[inputs.query_start[r + 1] - 1] + 1
            for group, size in enumerate(self.batch.block_sizes):
                table = inputs.block_tables[group][r]
                window = self.windows[group]
                for position in range(0 if window is None else max(0, first - window + 1), inputs.seq_lens[r]):
                    assert self.caches[group][table[position // size]][position % size] == (group, *tokens[: position + 1]), (
                        f"sequence {scheduled.seq_id} reads a foreign key at position {position}"
                    )
        assert inputs.query_start[-1] == np.sum([s.num_tokens for s in plan.scheduled])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        spare=st.integers(0, 12),
        groups=st.sampled_from(
            [[(1, None)], [(4, None)], [(3, None)], [(4, None), (2, None)], [(2, 5)], [(3, 1)], [(2, None), (2, 4), (2, 4)]]
        ),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(0, 20),
        policy=st.sampled_from(["fcfs", "priority"]),
    )
    def start(self, spare, groups, max_num_seqs, budget, policy):
        config = VllmConfig.default(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_seqs + budget, scheduling_policy=policy
        )
        specs = [group.spec for group in kv_cache(0, groups).groups]
        num_blocks = sum(spec.blocks_for(MAX_MODEL_LEN, max_num_seqs + budget) for spec in specs) + spare
        self.scheduler = Scheduler(config, kv_cache(num_blocks, groups))
        self.runner = FakeRunner(max_num_seqs, MAX_MODEL_LEN, groups, num_blocks)
        self.outputs: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str, dict[int, str]] = {}
        self.messages: dict[str, EngineRequest] = {}
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(0, 49), min_size=1, max_size=MAX_MODEL_LEN),
        n=st.integers(1, 4),
        max_tokens=st.one_of(st.none(), st.integers(1, 12)),
        eos=st.lists(st.integers(0, 49), max_size=3),
        ignore_eos=st.booleans(),
        priority=st.integers(-2, 2),
    )
    def add(self, prompt, n, max_tokens, eos, ignore_eos, priority):
        self.count += 1
        message = EngineRequest(
            request_id=f"r{self.count}",
            prompt_token_ids=prompt,
            params=SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos),
            eos_token_ids=eos,
            priority=priority,
            arrival_time=float(self.count),
        )
        try:
            self.scheduler.add(message)
        except RequestError:
            pool = self.scheduler.blocks.pool.num_blocks
            most = n * self.scheduler.blocks.blocks_for(MAX_MODEL_LEN, self.scheduler.max_num_batched_tokens)
            assert len(prompt) >= MAX_MODEL_LEN or n > self.scheduler.max_num_seqs or most > pool
        else:
            self.messages[message.request_id] = message
            self.outputs[message.request_id] = {i: [] for i in range(n)}
            self.reasons[message.request_id] = {}

    @rule(data=st.data())
    def abort(self, data):
        live = sorted(self.scheduler.requests)
        if live:
            request_id = data.draw(st.sampled_from(live))
            index = data.draw(st.one_of(st.none(), st.integers(0, self.messages[request_id].params.n - 1)))
            self.scheduler.finish(request_id, "abort", index)
            for i in self.outputs[request_id] if index is None else [index]:
                self.reasons[request_id].setdefault(i, "abort")

    @rule(times=st.integers(1, 5))
    def step(self, times):
        for _ in range(times):
            self.one_step()

    def one_step(self):
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.scheduled) <= self.scheduler.max_num_seqs
        assert bool(plan.scheduled) == self.scheduler.has_unfinished, "a step with work to do must do some"
        seen = [s.seq_id for s in plan.scheduled]
        assert len(set(seen)) == len(seen)
        for output in self.scheduler.update(plan, self.runner.execute(plan)):
            assert output.index not in self.reasons[output.request_id], "an ended sequence got a token"
            self.outputs[output.request_id][output.index] += output.token_ids
            if output.finish_reason:
                self.reasons[output.request_id][output.index] = output.finish_reason

    @invariant()
    def blocks_add_up(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.blocks.check()
        assert self.scheduler.num_running <= self.scheduler.max_num_seqs
        waiting = {s.seq_id for r in self.scheduler.waiting for s in r.sequences}
        assert not waiting & set(self.scheduler.blocks._tables), "a waiting request holds blocks"
        blocks, chunk = self.scheduler.blocks, self.scheduler.max_num_batched_tokens
        for seq_id in blocks._tables:
            for group, spec in enumerate(blocks.specs):
                held = [b for b in blocks.get_block_table(seq_id, group) if b != NO_BLOCK]
                assert len(held) <= spec.blocks_for(MAX_MODEL_LEN, chunk)
        if not self.scheduler.has_unfinished:
            assert blocks.pool.num_used == 0

    @invariant()
    def finished_outputs_are_right(self):
        if not hasattr(self, "scheduler"):
            return
        for request_id, reasons in self.reasons.items():
            for index, reason in reasons.items():
                assert self.outputs[request_id][index] == self.expected(request_id)[: len(self.outputs[request_id][index])]
                if reason != "abort":
                    assert self.outputs[request_id][index] == self.expected(request_id)

    def expected(self, request_id: str) -> list[int]:
        """What the request yields alone: the runner is greedy."""
        message = self.messages[request_id]
        params, tokens = message.params, list(message.prompt_token_ids)
        most = min(params.max_tokens or MAX_MODEL_LEN, MAX_MODEL_LEN - len(tokens))
        eos = set() if params.ignore_eos else set(message.eos_token_ids)
        while len(tokens) - len(message.prompt_token_ids) < most:
            tokens.append(self.runner.next_token(tokens))
            if tokens[-1] in eos:
                break
        return tokens[len(message.prompt_token_ids) :]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        steps = 0
        while self.scheduler.has_unfinished:
            self.one_step()
            steps += 1
            assert steps < 5000, "requests never end"
        for request_id, message in self.messages.items():
            assert set(self.reasons[request_id]) == set(range(message.params.n))
        self.finished_outputs_are_right()
        self.scheduler.blocks.check()
        assert self.scheduler.blocks.pool.num_used == 0


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestSchedulerMachine = SchedulerMachine.TestCase
