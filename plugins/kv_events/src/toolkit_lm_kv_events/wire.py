"""Messages: batches of events, as vLLM publishes them since June 2026.

A message has three frames: the topic, a sequence number of 8 bytes (big endian), and a batch in
msgpack. A batch is an array, and its events are maps with their class in the field `type`.

Sources: https://docs.vllm.ai/en/latest/api/vllm/distributed/kv_events/ and
https://docs.vllm.ai/en/latest/examples/features/kv_events/; that events are maps, and no arrays as
before: https://github.com/vllm-project/vllm/pull/42892; the topic in replays:
https://github.com/vllm-project/vllm/pull/45177.
"""

from __future__ import annotations

from msgspec import Struct

MEDIUM = "GPU"
"""vLLM's name for the device's own cache, whatever the device is."""
END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the message that ends a replay."""


class Event(Struct, omit_defaults=True, frozen=True, tag=True):
    """Base of all events."""


class BlockStored(Event, frozen=True):
    """A run of blocks of one sequence can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Hash of the block before the first; None: the run begins with the prompt."""
    token_ids: list[int]
    """Tokens of all blocks."""
    block_size: int
    lora_id: int | None
    """None: vLLM's own consumers read `lora_name`."""
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    """For each block, what its contents depend on beside tokens: salts, adapters, media."""
    group_idx: int | None = None
    """Number of the KV group. Engines with several publish the blocks of each."""
    kv_cache_spec_kind: str | None = None
    """full_attention, sliding_window, mla_attention, or the name of another kind."""
    kv_cache_spec_sliding_window: int | None = None
    prompt_chunks: list[tuple[int, int]] | None = None
    """Beginnings of the request's prompt as the client sent it: the digest of each, and the hash of
    the block in which it ends. vLLM has no such field, and skips it."""


class PromptChunk(Struct, array_like=True, frozen=True):
    """The beginning of a prompt, as the client sent it."""

    digest: int
    end: int
    """Number of its bytes."""


class Prompt(Struct, frozen=True):
    """A prompt as the client sent it, by which routers know it that have no tokens."""

    num_bytes: int
    chunks: list[PromptChunk]


PROMPT = "kv_events.prompt"
"""Key of a request's context: a Prompt in JSON, which toolkit-lm-router in the server writes."""


class BlockRemoved(Event, frozen=True):
    """Blocks are no longer found."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event, frozen=True):
    """No block is found any more. Also the first event of an engine."""


class EventBatch(Struct, array_like=True, omit_defaults=True, frozen=True):
    """The events of some time, in their order."""

    ts: float
    """time.time() at which the batch was made."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Group(Struct, frozen=True):
    """A KV group whose blocks are published."""

    group_idx: int
    kind: str
    block_size: int
    sliding_window: int | None = None


class Source(Struct, frozen=True):
    """Endpoints at which the events of one engine are published."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    data_parallel_rank: int
    block_size: int
    model: str
    groups: list[Group]
    num_published: int
    """Batches so far: the sequence number of the next one."""
    num_overflows: int
    """Times that more events waited than may. Each time, subscribers were told that the cache is
    empty."""


def short(digest: bytes) -> int:
    """Returns the hash of a digest on the wire: its last 8 bytes, as vLLM has it by default."""
    return int.from_bytes(digest[-8:], "big")
