"""HTTP: where the engines publish their events, for operators and routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter
from msgspec import to_builtins
from pydantic import BaseModel, Field
from toolkit_lm.errors import RequestError

from toolkit_lm_kv_events.wire import Source

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine


class KvGroup(BaseModel):
    """A KV group: layers that share block tables."""

    group_idx: int = Field(description="Number of the group in events.")
    kind: str = Field(description="Kind of the cache, in vLLM's words.")
    block_size: int = Field(description="Tokens of a block.")
    sliding_window: int | None = Field(description="Tokens of the window; null: there is none.")


class KvEventSource(BaseModel):
    """Endpoints at which one engine publishes its events."""

    endpoint: str = Field(description="Address of the PUB socket, as this machine names it.")
    replay_endpoint: str | None = Field(
        description="Address of the ROUTER socket for replays; null: there is none."
    )
    topic: str = Field(description="First frame of each message.")
    data_parallel_rank: int = Field(description="Number of the engine among several.")
    block_size: int = Field(description="Tokens of a block of the first group.")
    model: str = Field(description="The model of the engine.")
    groups: list[KvGroup] = Field(description="The groups whose blocks are published.")
    num_published: int = Field(description="Sequence number of the next batch.")
    num_overflows: int = Field(
        description="Times that subscribers were told of an empty cache, as too many events waited."
    )


class KvEventSources(BaseModel):
    """Answer of /kv_event_sources."""

    sources: list[KvEventSource] = Field(
        description="One for each engine; empty: no events are published."
    )


def add_routes(router: APIRouter, engine: ServingEngine) -> None:
    """Adds the route. Without events its list is empty."""

    async def kv_event_sources() -> KvEventSources:
        """Tells where engines publish the events of their KV caches."""
        try:
            found = await engine.call_workers("kv_events.source", None, Source)
        except RequestError:
            # The part is off.
            found = []
        return KvEventSources.model_validate({"sources": to_builtins(found)})

    router.add_api_route("/kv_event_sources", kv_event_sources)
