"""EngineCore over an executor that computes no model: a cache slot holds a hash of all tokens that
its key and value stand for."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch
import unruly_policy
from toolkit_lm.attention import BatchLimits
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.engine.core import EngineCore
from toolkit_lm.executor import Executor
from toolkit_lm.kv import (
    BlockManager,
    CrossSpec,
    FullSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVGroup,
    KVPool,
    WindowSpec,
)
from toolkit_lm.kv.group_blocks import HOST, Location
from toolkit_lm.messages import (
    EncoderInput,
    EngineRequest,
    MultiModalFeatureSpec,
    NewEncoder,
    NewSequence,
    ScheduledSequence,
    SequenceInputs,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing import RequestLimits
from toolkit_lm.runner import PersistentBatch, StepBuffers

PLUGINS = Plugins.load(
    PluginsConfig(plugins=[]),
    extra=[
        SimpleNamespace(name="unruly", toolkit_register_scheduling_policies=unruly_policy.register)
    ],
)
"""Core's own, and a scheduling policy."""
VOCAB = 50
NAN = VOCAB - 2
"""Who computes this token gets an error for its row."""
POISON = VOCAB - 1
"""Who computes this token makes the step fail."""

Groups = list[tuple[Any, ...]]
"""KV groups. Each has a block size; then a window, None, "late", ("late", window), "ahead",
"state", "snapshots", "often" or "cross"; then the index of the pool, or 0. For a state with
snapshots, the first number is that of the tokens between borders."""
ENCODER_INPUTS = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 5, 9, 2, 7], [8]]
"""Inputs of encoders. `SequenceInputs.second_text_start` tells the runner which one a sequence has,
if there are encoders."""
MAX_ENCODER_LEN = 8


class StateSpec(KVCacheSpec, frozen=True, kw_only=True, tag="state"):
    """A recurrent state: one block, which every step reads and writes."""

    caches_prefixes: ClassVar[bool] = False
    forks_anywhere: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    @property
    def page_bytes(self) -> int:
        return 64


class OftenSpec(StateSpec, frozen=True, kw_only=True, tag="often"):
    """A state of which a snapshot is kept at every border of a prompt."""

    def stops_at(self, start: int, num_prompt_tokens: int, border: int) -> int:
        stop = (start // border + 1) * border
        return stop if stop <= num_prompt_tokens else 0


STATES = ("state", "often")
"""Kinds whose block every step reads and writes."""


class LateSpec(FullSpec, frozen=True, kw_only=True, tag="late"):
    """Keys and values that a step reads before it writes."""

    shared_within_step: ClassVar[bool] = False


class LateWindowSpec(WindowSpec, frozen=True, kw_only=True, tag="late_window"):
    """A window whose keys and values a step reads before it writes."""

    shared_within_step: ClassVar[bool] = False


def make_spec(size: int, kind: Any, lag: int = 0) -> KVCacheSpec:
    shape = {
        "block_size": size,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": "float32",
        "lag": lag,
    }
    if kind == "state":
        return StateSpec(block_size=64)
    if kind in ("snapshots", "often"):
        return (StateSpec if kind == "snapshots" else OftenSpec)(block_size=64, snapshots=size)
    if kind in ("late", "cross"):
        return (LateSpec if kind == "late" else CrossSpec)(**shape)
    if kind == "ahead":
        return FullSpec(**shape, lookahead=3)
    if isinstance(kind, tuple):
        return LateWindowSpec(window=kind[1], **shape)
    return FullSpec(**shape) if kind is None else WindowSpec(window=kind, **shape)


def kv_cache(
    num_blocks: int | list[int], groups: Groups, num_host_blocks: int = 0
) -> KVCacheConfig:
    """`num_blocks`: of the only pool, or of each."""
    sizes = num_blocks if isinstance(num_blocks, list) else [num_blocks]
    made = [
        KVGroup(make_spec(*group[:2], *group[3:]), "none", [f"layer{i}"], *group[2:3])
        for i, group in enumerate(groups)
    ]
    if not made:
        return KVCacheConfig([], [])
    pages = [
        max(group.spec.page_bytes for group in made if group.pool == pool)
        for pool in range(len(sizes))
    ]
    return KVCacheConfig(
        made,
        [KVPool(page, 1, size, num_host_blocks) for page, size in zip(pages, sizes, strict=True)],
    )


def next_token(tokens: list[int]) -> int:
    """Greedy: a function of the whole prefix."""
    drawn = hash(tuple(tokens)) % 397
    return {0: POISON, 1: NAN}.get(drawn, drawn % NAN)


def guess(tokens: list[int]) -> list[int]:
    """A drafter: up to four tokens, of which the first ones are right."""
    right, wrong = divmod(hash((*tokens, "guess")) % 9, 3)
    guesses: list[int] = []
    for i in range(right + wrong):
        token = next_token(tokens + guesses)
        guesses.append(token if i < right else (token + 1) % NAN)
    return guesses


def drafts_of(scheduled: ScheduledSequence) -> list[int]:
    """The drafts among the tokens that a row computes."""
    return scheduled.tokens[len(scheduled.tokens) - scheduled.num_drafts :]


class FakeRunner:
    """Runs plans on the real PersistentBatch. A sequence's seed is the place from which on its keys
    are not those of its tokens alone."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig) -> None:
        specs = [group.spec for group in cache.groups]
        max_len = config.max_model_len
        limits = BatchLimits(config.scheduler.max_num_seqs, config.scheduler.token_budget, max_len)
        widths = [
            spec.num_blocks(MAX_ENCODER_LEN if spec.of_encoder else max_len) for spec in specs
        ]
        buffers = StepBuffers(limits, widths, torch.device("cpu"))
        self.batch = PersistentBatch(buffers, specs, max_len)
        self.specs = specs
        self.caches = self._memory(cache, [pool.num_blocks for pool in cache.pools])
        self.host_caches = self._memory(cache, [pool.num_host_blocks for pool in cache.pools])
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, int | None] = {}
        self.encoder_inputs: dict[int, int | None] = {}
        """Index in ENCODER_INPUTS of each sequence's encoder input, by seq_id."""
        self.features: dict[int, list[MultiModalFeatureSpec]] = {}
        self.items: dict[str, int] = {}
        """Number of embeddings that are held, by item identifier."""
        self.most_embeds = config.encoder_cache_embeds
        self.whole_items = False
        self.num_computed = 0
        self.token_budget = config.scheduler.token_budget
        self.max_len = max_len
        self.writers: dict[tuple[int, int, int], int] = {}
        """The sequence that writes a slot in this step, by group, block and offset."""
        self.drafting = config.scheduler.drafter is not None
        self.last_inputs: list[list[int]] = []
        """Per row of the last step, the tokens that it computed."""

    @staticmethod
    def _memory(cache: KVCacheConfig, num_blocks: list[int]) -> list[list[list[object]]]:
        """Memory by group. Groups of one pool and block size share their memory."""
        memory: dict[tuple[int, int], list[list[object]]] = {}
        return [
            memory.setdefault(
                (g.pool, g.spec.block_size),
                [[None] * g.spec.block_size for _ in range(num_blocks[g.pool])],
            )
            for g in cache.groups
        ]

    def execute(self, plan: StepPlan) -> StepResult:
        self.batch.apply(plan)
        for seq_id in plan.dropped:
            self.tokens.pop(seq_id, None)
            self.features.pop(seq_id, None)
        self._encode_items(plan)
        for copies, source, target in (
            (plan.swap_out, self.caches, self.host_caches),
            (plan.swap_in, self.host_caches, self.caches),
            (plan.copies, self.caches, self.caches),
        ):
            for copy in copies:
                target[copy.group][copy.target] = list(source[copy.group][copy.source])
        for new in plan.new:
            self.tokens[new.seq_id] = list(new.token_ids)
            self.salts[new.seq_id] = new.params.seed
            self.encoder_inputs[new.seq_id] = new.inputs.second_text_start
            assert all(feature.data is None for feature in new.features), (
                "pixels travel with a sequence"
            )
            self.features[new.seq_id] = new.features
        if not plan.scheduled:
            self.last_inputs = []
            return StepResult(token_ids=[])
        for scheduled in plan.scheduled:
            self.tokens[scheduled.seq_id] += drafts_of(scheduled)
        inputs = self.batch.inputs(plan)
        self.last_inputs = [
            tokens.tolist() for tokens in np.split(inputs.input_ids, inputs.query_start[1:-1])
        ]
        self.num_computed += int(inputs.query_start[-1])
        self._encode(plan, inputs)
        self._check_items(plan)
        self._write(plan, inputs)
        if POISON in inputs.input_ids:
            raise RuntimeError("poisoned")
        self._check_reads(plan, inputs)
        return self._draw(plan, inputs)

    def _draw(self, plan: StepPlan, inputs) -> StepResult:
        result = StepResult(token_ids=[])
        for r, scheduled in enumerate(plan.scheduled):
            drafts = drafts_of(scheduled)
            tokens = self.tokens[scheduled.seq_id][
                : len(self.tokens[scheduled.seq_id]) - len(drafts)
            ]
            drawn = [next_token(tokens)] if scheduled.samples else []
            while drawn and drawn == drafts[: len(drawn)]:
                drawn.append(next_token(tokens + drawn))
            start = inputs.query_start[r]
            end = inputs.query_start[r + 1]
            if NAN in inputs.input_ids[start : end - len(drafts) + max(0, len(drawn) - 1)]:
                result.errors[scheduled.seq_id] = "not a number"
            result.prompt_logprobs |= self._prompt_logprobs(plan, scheduled, inputs, r)
            result.token_ids.append(drawn)
            self.tokens[scheduled.seq_id] = tokens + drawn
            for token in drawn:
                self.batch.append_tokens(inputs.rows[r : r + 1], [token])
            assert (
                self.batch.history.tokens(inputs.rows[r]).tolist()
                == (tokens + drawn)[: self.max_len]
            )
            if drawn and self.drafting:
                result.drafts[scheduled.seq_id] = guess(tokens + drawn)
        return result

    def _prompt_logprobs(
        self, plan: StepPlan, scheduled: ScheduledSequence, inputs, r: int
    ) -> dict[int, list[TokenLogprobs]]:
        row = inputs.rows[r]
        if self.batch.sampling.prompt_logprobs[row] < 0:
            return {}
        # The token after each computed one, where it is of the prompt and not returned before.
        known = int(self.batch.num_prompt_logprobs[row])
        last = int(self.batch.history.num_prompt_tokens[row])
        positions = [
            int(p) + 1
            for p in inputs.token_index[inputs.query_start[r] : inputs.query_start[r + 1]]
        ]
        fresh = [p for p in positions if known < p < last]
        self.batch.num_prompt_logprobs[row] += len(fresh)
        return (
            {
                scheduled.seq_id: [
                    TokenLogprobs([self.tokens[scheduled.seq_id][p]], [0.0], 1) for p in fresh
                ]
            }
            if fresh
            else {}
        )

    def _key(self, group: int, seq_id: int, position: int) -> tuple[object, ...]:
        salt = self.salts[seq_id]
        keyed = salt if salt is not None and salt <= position else None
        encoder = self.encoder_inputs[seq_id]
        media = tuple(
            one.mm_identifier for one in self.features[seq_id] if one.mm_position.offset <= position
        )
        return (group, keyed, encoder, media, hash(tuple(self.tokens[seq_id][: position + 1])))

    def _encode_items(self, plan: StepPlan) -> None:
        for name in plan.dropped_items:
            self.items.pop(name, None)
        encoded = {item.identifier: item.data["embeds"].shape[0] for item in plan.encode}
        assert len(encoded) == len(plan.encode) and not encoded.keys() & self.items.keys(), (
            "an item is encoded twice"
        )
        made = [count for count in encoded.values() if count]
        assert len(made) <= 1 or sum(made) <= self.token_budget, "a step encodes more than it may"
        self.items |= encoded
        assert sum(self.items.values()) <= self.most_embeds, "more embeddings than the cache holds"

    def _check_items(self, plan: StepPlan) -> None:
        """All items are there of which the step computes tokens."""
        for row in plan.scheduled:
            end = row.start + row.num_tokens
            for place, name in (
                (one.mm_position, one.mm_identifier) for one in self.features[row.seq_id]
            ):
                if place.offset < end and row.start < place.end:
                    assert self.items[name] == place.num_embeds, "an item that is not encoded"
                assert not (self.whole_items and place.offset < end < place.end), (
                    "a chunk ends inside an item"
                )

    def _encode(self, plan: StepPlan, inputs) -> None:
        """Writes what cross attention reads."""
        computed = [
            encoder.input.token_ids for encoder in plan.encoders if encoder.input is not None
        ]
        assert bool(computed) == (inputs.encoders is not None)
        tokens = [(read, position) for read in computed for position in range(len(read))]
        if tokens:
            assert inputs.encoders.positions.tolist() == [position for _, position in tokens]
        for group, spec in enumerate(self.specs):
            if spec.of_encoder:
                slots = inputs.groups[group].slots.tolist()
                assert len(slots) == len(tokens) == len(set(slots))
                for slot, (read, position) in zip(slots, tokens, strict=True):
                    self.caches[group][slot // spec.block_size][slot % spec.block_size] = (
                        group,
                        tuple(read),
                        position,
                    )

    def _write(self, plan: StepPlan, inputs) -> None:
        self.writers.clear()
        for r, scheduled in enumerate(plan.scheduled):
            for group, spec in enumerate(self.specs):
                if spec.kind in STATES:
                    self._advance(scheduled.seq_id, inputs, r, group)
            for t in range(inputs.query_start[r], inputs.query_start[r + 1]):
                position = int(inputs.token_index[t])
                assert [inputs.input_ids[t]] == self.tokens[scheduled.seq_id][
                    position : position + 1
                ], "a token that it does not have"
                for group, spec in enumerate(self.specs):
                    if spec.kind not in (*STATES, "cross"):
                        block, offset = divmod(int(inputs.groups[group].slots[t]), spec.block_size)
                        self.caches[group][block][offset] = self._key(
                            group, scheduled.seq_id, position
                        )
                        self.writers[group, block, offset] = scheduled.seq_id

    def _advance(self, seq_id: int, inputs, r: int, group: int) -> None:
        """A state is read as the tokens before this step left it, and written."""
        block = self.caches[group][inputs.groups[group].table[r, 0]]
        start = int(inputs.starts[r])
        if start:
            assert block[0] == self._key(group, seq_id, start - 1), (
                f"sequence {seq_id} reads a foreign state of group {group} at {start}"
            )
        block[0] = self._key(
            group, seq_id, start + int(inputs.query_start[r + 1] - inputs.query_start[r]) - 1
        )

    def _check_reads(self, plan: StepPlan, inputs) -> None:
        for r, scheduled in enumerate(plan.scheduled):
            first = int(inputs.starts[r])
            length = int(inputs.token_index[inputs.query_start[r + 1] - 1]) + 1
            for group, spec in enumerate(self.specs):
                if spec.of_encoder:
                    self._check_cross(scheduled.seq_id, inputs.groups[group], r, group)
                    continue
                assert inputs.groups[group].seq_lens[r] == length
                if spec.kind in STATES:
                    continue
                table = inputs.groups[group].table[r]
                window = getattr(spec, "window", first + 1)
                size = spec.block_size
                for position in range(max(0, first - window + 1), length):
                    found = self.caches[group][table[position // size]][position % size]
                    writer = self.writers.get(
                        (group, int(table[position // size]), position % size), scheduled.seq_id
                    )
                    assert spec.shared_within_step or writer == scheduled.seq_id, (
                        "it reads what another row of the step writes"
                    )
                    assert found == self._key(group, scheduled.seq_id, position), (
                        f"sequence {scheduled.seq_id} reads a foreign key at position "
                        f"{position} of group {group}"
                    )

    def _check_cross(self, seq_id: int, seen, r: int, group: int) -> None:
        """All of its encoder's keys are there, and no others are seen."""
        which = self.encoder_inputs[seq_id]
        size = self.specs[group].block_size
        assert which is not None, "a sequence without an encoder"
        read = ENCODER_INPUTS[which]
        found = [
            self.caches[group][seen.table[r, p // size]][p % size] for p in range(seen.seq_lens[r])
        ]
        assert found == [(group, tuple(read), p) for p in range(len(read))], (
            f"sequence {seq_id} reads foreign keys in group {group}"
        )


class FirstStage:
    """A pipeline stage that draws nothing: it has all tokens from the plans."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}

    def run(self, plan: StepPlan) -> list[list[int]]:
        """The tokens that each row of the plan computes."""
        for seq_id in plan.dropped:
            self.tokens.pop(seq_id, None)
        for new in plan.new:
            self.tokens[new.seq_id] = list(new.token_ids)
        inputs = []
        for row in plan.scheduled:
            if row.tokens:
                self.tokens[row.seq_id][row.start :] = row.tokens
            inputs.append(self.tokens[row.seq_id][row.start : row.start + row.num_tokens])
        assert [len(tokens) for tokens in inputs] == [row.num_tokens for row in plan.scheduled], (
            "a token that only the last stage has"
        )
        return inputs


def check_blocks(blocks: BlockManager) -> None:
    """Asserts the invariants of block tables and pools."""
    for index, (pool, host_pool) in enumerate(zip(blocks.pools, blocks.host_pools, strict=True)):
        tables = [
            table
            for group, table in blocks._tables_of(list(blocks._tables))
            if group.pool_index == index
        ]
        entries = [entry for table in tables for entry in table]
        device = Counter(entry for entry in entries if isinstance(entry, int))
        host = Counter(entry.id for entry in entries if isinstance(entry, Location))
        assert {entry.tier for entry in entries if isinstance(entry, Location)} <= {HOST}
        for one, owners in ((pool, device), (host_pool, host)):
            assert all(one.ref_counts[b] == owners.get(b, 0) for b in range(one.num_blocks)), (
                "reference counts differ from owners"
            )
            assert one.num_free + len(owners) == one.num_blocks, (
                "free + owned blocks differ from the total"
            )
            assert one.num_cached == sum(one.ref_counts[block] == 0 for block in one._keys), (
                "the count of cached blocks is wrong"
            )
        for table in tables:
            held = [entry for entry in table if entry is not None]
            assert len(set(held)) == len(held), "a table names a block twice"


class Flight(Future[StepResult]):
    """A step's result; whoever takes in a failure has the runner forget that it is broken."""

    executor: FakeExecutor

    def result(self, timeout: float | None = None) -> StepResult:
        if self.exception() is not None:
            self.executor.broken = False
        return super().result(timeout)


class FakeExecutor(Executor):
    """Runs a step at once; its results are as late as the engine allows: `max_in_flight` steps.

    With pipeline stages, what the first one would compute is compared with what is computed.
    """

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, max_in_flight: int) -> None:
        self.runner = FakeRunner(config, cache)
        self.first_stage = FirstStage() if config.parallel.pipeline_parallel_size > 1 else None
        self.cache = cache
        self.max_in_flight = max_in_flight
        self.transient: str | None = None
        """Point at which the next step fails, once: "before" or "after" it was computed."""
        self.broken = False
        """A step failed, and the engine does not know yet: what is computed now is worth
        nothing."""
        self.death: Exception | None = None
        """A worker has died: every step fails with it."""
        self.plans: list[StepPlan] = []
        self._encoded = b""

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        self.check_last_plan()
        self.plans.append(plan)
        self._encoded = msgspec.msgpack.encode(plan)
        future = Flight()
        future.executor = self
        transient, self.transient = self.transient, None
        if self.death is not None:
            future.set_exception(self.death)
            return future
        try:
            if transient == "before":
                raise RuntimeError("a hiccup")
            first = self.first_stage.run(plan) if self.first_stage is not None else None
            result = self.runner.execute(plan)
            assert first is None or first == self.runner.last_inputs, (
                "the first stage has other tokens than the last"
            )
            if transient == "after" or self.broken:
                raise RuntimeError("a hiccup")
        except Exception as error:
            if isinstance(error, AssertionError) and not self.broken:
                raise SystemExit(str(error)) from error
            self.broken = True
            future.set_exception(error)
        else:
            future.set_result(result)
        return future

    def check_last_plan(self) -> None:
        """A worker reads a plan while the next is made."""
        if self.plans:
            assert msgspec.msgpack.encode(self.plans[-1]) == self._encoded, (
                "a plan was changed after it was given away"
            )

    def warm_up(self) -> None:
        pools = [group.pool for group in self.cache.groups]
        tables = [[pools[:index].count(pool)] for index, pool in enumerate(pools)]
        of_encoder = [group.spec.of_encoder for group in self.cache.groups]
        new = NewSequence(
            seq_id=-1,
            token_ids=[0],
            num_prompt_tokens=1,
            block_tables=[
                [] if encoded else table for table, encoded in zip(tables, of_encoder, strict=True)
            ],
            params=SamplingParams(),
            seed=0,
            stop_token_ids=[],
        )
        plan = StepPlan(
            new=[new], scheduled=[ScheduledSequence(-1, 0, 1, [[] for _ in tables], True)]
        )
        if any(of_encoder):
            cross = [
                table if encoded else [] for table, encoded in zip(tables, of_encoder, strict=True)
            ]
            read = EncoderInput.of_tokens(ENCODER_INPUTS[2])
            plan.encoders = [
                NewEncoder(encoder_id=-2, num_tokens=1, block_tables=cross, input=read)
            ]
            new.encoder_id = -2
            new.inputs = SequenceInputs(second_text_start=2)
        self.runner.execute(plan)
        self.runner.execute(StepPlan(dropped=[-1, -2]))

    def load(self) -> None: ...

    def kv_cache_specs(self):
        return [{}]

    def backends(self):
        return {}

    def part_facts(self):
        return {}

    def free_memory(self) -> int:
        return 0

    def free_host_memory(self) -> int:
        return 0

    def init_kv_cache(self, kv_caches: list[KVCacheConfig]) -> None: ...

    def shutdown(self) -> None: ...


class FakeCore(EngineCore):
    """An engine core over a FakeExecutor. It has the cache that it is given, and a front's
    limits."""

    executor: FakeExecutor

    def __init__(
        self,
        config: VllmConfig,
        cache: KVCacheConfig,
        max_in_flight: int = 1,
        *,
        whole_items: bool = False,
    ) -> None:
        self._cache = cache
        self.limits = RequestLimits(config, cache, whole_items=whole_items)
        super().__init__(config, PLUGINS, FakeExecutor(config, cache, max_in_flight))
        self.executor.runner.whole_items = self.scheduler.items.whole_items = whole_items
        self.scheduler.rules = self.scheduler.rules._replace(whole_items=whole_items)

    def add_request(self, request: EngineRequest) -> None:
        """Adds a request as a front does."""
        request.max_output_tokens = self.limits.check(request)
        request.reads_prefix_cache = request.params.prompt_logprobs is None
        super().add_request(request)

    def _plan_kv_cache(self, specs) -> KVCacheConfig:
        return self._cache
