"""Engine half: makes events of what the block pools tell."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence as Collection
from typing import Any

from msgspec import Raw, json
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheSpec, WindowSpec
from toolkit_lm.scheduler import Planner, Sequence
from toolkit_lm.step import worker_method

from toolkit_lm_kv_events.publisher import Publisher
from toolkit_lm_kv_events.wire import (
    MEDIUM,
    PROMPT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Group,
    Prompt,
    Source,
    short,
)

RANK = "TOOLKIT_LM_ENGINE_NUMBER"
"""Variable of an engine's process: its number among several."""
_MOST_PROMPTS = 4096
"""Most requests of which it is known how much of their prompts was told."""
_ADAPTER = "lora.adapter"
"""Key of a request's context: the name of its adapter."""
_KINDS = {"full": "full_attention", "window": "sliding_window", "latent": "mla_attention"}
"""vLLM's names of kinds."""


class KvEventsPlanner(Planner):
    """Publishes which blocks other requests can find.

    Left out are drafters' layers, states of recurrent layers, and encoders: a router finds prefixes
    by the blocks of attention.
    """

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        """Opens the sockets. Raises ConfigError."""
        self._config = config
        self._options = options
        self._groups: dict[int, Group] | None = None
        """Groups whose blocks are published, by index. None: the engine is not complete."""
        self._published_ends: OrderedDict[str, int] = OrderedDict()
        """The block up to which the chunks of a request's prompt were told, by request."""
        self._publisher = Publisher(
            options.endpoint,
            options.replay_endpoint,
            rank=int(os.environ.get(RANK, "0")),
            topic=options.topic,
            buffer_steps=options.buffer_steps,
            buffer_bytes=int(options.buffer_mib * 2**20),
            hwm=options.hwm,
            max_queue_size=options.max_queue_size,
        )

    def stored(self, seq: Sequence, group: Any, indices: list[int]) -> None:
        if (shown := self._published.get(group.index)) is None:
            return
        size = group.size
        hashes = seq.block_hashes(size, indices[-1] + 1)
        keys = seq.request.cache_keys
        chunks = self._prompt_chunks(seq, group, indices, hashes)
        for first, end in _runs(indices):
            extra = [
                [key.key for key in keys if key.start < (i + 1) * size and i * size < key.end]
                for i in (range(first, end) if keys else ())
            ]
            self._publisher.put(
                BlockStored(
                    block_hashes=[short(digest) for digest in hashes[first:end]],
                    parent_block_hash=short(hashes[first - 1]) if first else None,
                    token_ids=seq.token_ids[first * size : end * size],
                    block_size=size,
                    lora_id=None,
                    medium=MEDIUM,
                    lora_name=seq.request.context.get(_ADAPTER),
                    extra_keys=[found or None for found in extra] if any(extra) else None,
                    group_idx=group.index,
                    kv_cache_spec_kind=shown.kind,
                    kv_cache_spec_sliding_window=shown.sliding_window,
                    prompt_chunks=chunks if end == indices[-1] + 1 else None,
                )
            )

    def _prompt_chunks(
        self, seq: Sequence, group: Any, indices: list[int], hashes: Collection[bytes]
    ) -> list[tuple[int, int]] | None:
        """Returns the chunks of the prompt that end in blocks up to the last stored one, as in
        BlockStored: those of the stored blocks, and those before them at the first time, as these
        blocks may have come with another prompt. None: there are none."""
        request = seq.request
        text = request.context.get(PROMPT)
        if text is None or group.index != next(iter(self._published)):
            return None
        published = self._published_ends.pop(request.request_id, 0)
        self._published_ends[request.request_id] = max(published, indices[-1] + 1)
        if len(self._published_ends) > _MOST_PROMPTS:
            self._published_ends.popitem(last=False)
        if indices[0] * group.size >= request.num_prompt_tokens:
            return None
        prompt = json.decode(text, type=Prompt)
        found = [
            (chunk.digest, short(hashes[index]))
            for chunk in prompt.chunks
            if (index := _last_block(chunk.end, prompt, request.num_prompt_tokens, group.size))
            <= indices[-1]
            and (index >= published or index >= indices[0])
            and (index + 1) * group.size <= request.num_prompt_tokens
        ]
        return found or None

    def forgotten(self, content: tuple[int, bytes] | None) -> None:
        if content is None:
            self._publisher.put(AllBlocksCleared())
        elif content[0] in self._published:
            self._publisher.put(BlockRemoved([short(content[1])], MEDIUM, content[0]))

    def close(self) -> None:
        self._publisher.close()

    @worker_method
    def source(self) -> Source:
        """Returns where this engine publishes."""
        groups = list(self._published.values())
        return Source(
            endpoint=self._publisher.endpoint,
            replay_endpoint=self._publisher.replay_endpoint,
            topic=self._options.topic,
            data_parallel_rank=self._publisher.rank,
            block_size=groups[0].block_size if groups else self._config.cache.block_size,
            model=self._config.model.model,
            groups=groups,
            num_published=self._publisher.num_published,
            num_overflows=self._publisher.num_overflows,
        )

    @property
    def _published(self) -> dict[int, Group]:
        if self._groups is None:
            specs = [group.spec for group in self.engine.kv_cache.groups]
            self._groups = {
                i: _group(i, spec) for i, spec in enumerate(specs) if _is_published(spec)
            }
        return self._groups


def _is_published(spec: KVCacheSpec) -> bool:
    return spec.caches_prefixes and not (spec.of_encoder or spec.snapshots or spec.lag)


def _group(index: int, spec: KVCacheSpec) -> Group:
    window = spec.window if isinstance(spec, WindowSpec) else None
    return Group(index, _KINDS.get(spec.kind, spec.kind), spec.block_size, window)


def _last_block(end: int, prompt: Prompt, num_tokens: int, size: int) -> int:
    """Returns the index of the block in which the first `end` bytes of a prompt end, where each of
    its bytes has as many tokens."""
    return max(-(-end * num_tokens // (prompt.num_bytes * size)) - 1, 0)


def _runs(indices: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yields [first, end) of each run of consecutive indices, which ascend."""
    first = indices[0]
    for index, following in zip(indices, [*indices[1:], None], strict=True):
        if following != index + 1:
            yield first, index + 1
            first = following or 0
