"""Engine half: which blocks of a request are offered to peers, and which peers have. Needs no
torch."""

from __future__ import annotations

import json
import logging
import uuid
from collections import deque
from collections.abc import Iterable, Sequence as Collection
from functools import partial
from typing import Any

import numpy as np
from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import TokenRange
from toolkit_lm.messages import Array, StepPlan
from toolkit_lm.scheduler import Planner, Request, Sequence
from toolkit_lm.step import worker_method

from toolkit_lm_kv_transfer.settings import first_port, parse
from toolkit_lm_kv_transfer.share import ARRAY, PART, Asked, Content, Counts, News, short
from toolkit_lm_kv_transfer.tier import TransferTier

logger = logging.getLogger(__name__)


class TransferPlanner(Planner):
    """Tells the tier what each request offers and fetches, and makes `kv_transfer_params`."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self._config = config
        self._options = options
        self._engine_id = uuid.uuid4().hex
        self._offers: dict[str, set[Content]] = {}
        """Blocks that a request has not offered yet, by request."""
        self._fetches: dict[str, list[tuple[int, int]]] = {}
        """Blocks that a request has announced, by request."""
        self._news = News()
        """What the workers are told with the next step."""
        self._shown: deque[Content] = deque()
        """Blocks of ended requests that are on the device, and are offered from there."""

    @property
    def _tier(self) -> TransferTier | None:
        tier = self.engine.scheduler.tiers.tiers.get(PART)
        assert tier is None or isinstance(tier, TransferTier), f"{PART!r} is another plugin's tier"
        return tier

    def end_of(self, request: Request) -> int:
        """A request arrives. None of its tokens needs `commit`."""
        share = request.inputs.parts.get(PART)
        tier = self._tier
        if share is not None and tier is not None:
            asked = msgpack.decode(share, type=Asked)
            if asked.is_foreign:
                tier.count("foreign")
            if asked.offers:
                self._begin_offer(request, tier)
            blocks = [(g, number) for g, numbers in enumerate(asked.fetches) for number in numbers]
            if asked.is_early:
                contents = self._contents(request.leader, self._length(request))
                self._news.early += contents
                blocks = [(group, short(digest)) for group, digest in contents]
            if blocks:
                tier.counts.fetching_requests += 1
                self._fetches[request.request_id] = blocks
                tier.announce(blocks)
        return 0

    def commit(self, plan: StepPlan, request: Request, ranges: Collection[TokenRange]) -> None:
        """Never called: see `end_of`."""

    def release(self, request_id: str) -> None:
        tier = self._tier
        if tier is None or request_id in self.engine.scheduler.roster.requests:
            return
        if (contents := self._offers.pop(request_id, None)) is not None:
            tier.unwant(contents)
            self._news.ended.append(request_id)
        if (blocks := self._fetches.pop(request_id, None)) is not None:
            tier.forget(blocks)

    def end_step(self) -> Raw | None:
        """Shows the tier blocks that are on the device: each once in a step. Workers hear that a
        request has ended after they have stored its blocks, which this plan brings, too."""
        seen = set()
        later: deque[Content] = deque()
        groups = self.engine.scheduler.blocks.groups
        while self._shown:
            content = self._shown.popleft()
            if content in seen:
                later.append(content)
                continue
            seen.add(content)
            pool = groups[content[0]].pool
            if (block := pool.find(content)) is not None and pool.on_evicted is not None:
                pool.on_evicted(content, block)
        self._shown = later
        if self._news == _NONE:
            return None
        news, self._news = self._news, News()
        return Raw(msgpack.encode(news))

    def awaits(self) -> bool:
        return bool(self._shown) or self._news != _NONE

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Workers may not have heard what these plans brought: they hear it again."""
        lost = [msgpack.decode(plan.parts[PART], type=News) for plan in plans if PART in plan.parts]
        news = [*lost, self._news]
        self._news = News(
            [each for some in news for each in some.begun],
            [each for some in news for each in some.ended],
            [each for some in news for each in some.early],
        )

    @worker_method
    def counts(self) -> Counts:
        """Returns the figures of the scheduler's half."""
        tier = self._tier
        return Counts() if tier is None else tier.counts

    def _begin_offer(self, request: Request, tier: TransferTier) -> None:
        """Blocks of the prompt are offered as steps fill them."""
        leader = request.leader
        contents = set(self._contents(leader, self._length(request)))
        self._offers[request.request_id] = contents
        self._news.begun.append((request.request_id, [*contents]))
        tier.counts.offered_requests += 1
        tier.want(contents)
        leader.arrays[ARRAY] = partial(_params, self, contents)

    def _length(self, request: Request) -> int:
        """Tokens of a prompt whose blocks can be another's prefix."""
        border: int = self.engine.scheduler.blocks.border
        return (request.num_prompt_tokens - 1) // border * border

    def _contents(self, seq: Sequence, num_tokens: int) -> list[Content]:
        """Needs of a cached prefix of so many tokens."""
        return [
            (group.index, digest)
            for group in self.engine.scheduler.blocks.groups
            if num_tokens and not group.spec.of_encoder
            for _, digest in group.wanted(seq.block_hashes, num_tokens)
        ]

    def params(self, lacking: set[Content], seq: Sequence) -> dict[str, Any]:
        """`kv_transfer_params` of a sequence that ends. `lacking`, what is not offered yet, is
        offered now."""
        request = seq.request
        blocks = self.engine.scheduler.blocks
        tier = self._tier
        assert tier is not None, "without the tier nothing is offered"
        self._offers.pop(request.request_id, None)
        self._news.ended.append(request.request_id)
        tier.unwant(lacking)
        expected = set(self._contents(seq, self._length(request)))

        def has_stored(group: int, digests: Collection[bytes]) -> int:
            flags = [(group, d) in expected and (group, d) not in lacking for d in digests]
            return flags.index(False) if False in flags else len(flags)

        length = blocks.find_prefix(seq.block_hashes, request.num_prompt_tokens - 1, has_stored)
        contents = self._contents(seq, length)
        rest = [each for each in contents if each in lacking or each not in expected]
        tier.offer(rest)
        self._shown += rest
        ids: list[list[int]] = [[] for _ in blocks.groups]
        for group, digest in contents:
            ids[group].append(short(digest))
        stated = self._options.advertise or self._options.listen
        address = first_port(self._config, parse("listen", stated))
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self._engine_id,
            "remote_host": address.host,
            "remote_port": address.port,
            "remote_block_ids": ids,
            "tp_size": self._config.parallel.tensor_parallel_size,
        }


_NONE = News()


def _params(planner: TransferPlanner, lacking: set[Content], seq: Sequence) -> Array:
    """The params as JSON, in an array of bytes."""
    text = json.dumps(planner.params(lacking, seq)).encode()
    return Array.of(np.frombuffer(text, np.uint8).copy())
