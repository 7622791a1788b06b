"""Shapes of the router's own answers and bodies, for the description of the API."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field
from toolkit_lm_server.schema_texts import Described


class RouterStatus(Described):
    status: Literal["ready", "starting", "draining"]
    """ready: at least one backend serves. starting: none does. draining: the router is being
    stopped."""
    backends: dict[str, int]
    """Number of backends in each state."""


class BackendInfo(Described):
    url: str
    """The backend's URL."""
    state: Literal["starting", "ready", "draining", "down"]
    """starting: it has not been asked yet. draining: it gets no new requests. down: it has failed,
    or is not healthy."""
    reason: str
    """The reason of a state other than ready."""
    role: Literal["serve", "prefill"]
    """serve: it answers requests. prefill: it computes long prompts for those that do."""
    models: list[str]
    """Names of its models and adapters."""
    is_ours: bool
    """It is a server of toolkit-lm: its streams can go on elsewhere."""
    inflight: int
    """Requests that it has now."""
    requests: int
    """Requests that it was sent."""
    retries: int
    """Requests that failed there before their answer, and left it."""
    migrations: int
    """Streams that broke off there, and went on elsewhere."""
    prefix_hit_share: float | None
    """Share of the prompts' chunks that it had had before. null: it was sent none."""
    event_gaps: int | None
    """Times that KV events of it were missed. null: they are not followed."""
    queue_seconds: float
    """Seconds that its requests have waited in the router."""


class BackendList(Described):
    backends: list[BackendInfo]
    """All backends, in the order in which they were added."""


class BackendBody(Described):
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"url": "http://10.0.0.2:8000"}]}
    )

    url: str = Field(max_length=2048)
    """The backend's URL."""


class NewBackendBody(BackendBody):
    role: Literal["serve", "prefill"] = "serve"
    """serve: it answers requests. prefill: it computes long prompts for those that do."""


class RoutedModel(Described):
    model_config = ConfigDict(extra="allow")

    id: str
    """The model's name."""
    object: Literal["model"] = "model"
    """Always "model"."""
    backends: int
    """Number of backends that serve it now."""


class RoutedModels(Described):
    object: Literal["list"] = "list"
    """Always "list"."""
    data: list[RoutedModel]
    """The models of all backends, each once, as the first of them describes it."""


class Version(Described):
    version: str
    """The version of toolkit-lm."""
