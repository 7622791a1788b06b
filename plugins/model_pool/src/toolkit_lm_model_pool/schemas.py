"""Bodies and answers of a pool's own routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from toolkit_lm_server.schema_texts import Described

StateName = Literal["cold", "loading", "ready", "asleep", "unloading", "failed"]


class NamedBody(BaseModel):
    """Body of the routes that load and unload."""

    model_config = {"extra": "forbid"}
    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the model."""


class UnloadBody(BaseModel):
    """Body of /unload."""

    model_config = {"extra": "forbid"}
    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the model. null: all models but the pinned."""


class SleepBody(NamedBody):
    """Body of /models/sleep."""

    level: Literal[1, 2] | None = None
    """What the model gives up: the KV cache (1), or the weights, too (2). null: as its entry
    says."""


class ShowBody(BaseModel):
    """Body of /api/show, with whatever else Ollama's clients send."""

    model: str | None = None
    """Name of the model."""
    name: str | None = None
    """The same, by its old name."""


class LlamaStatus(Described):
    value: Literal["unloaded", "loading", "loaded", "sleeping"]
    """State of the model, by llama.cpp's names."""
    failed: bool = False
    """The last start has failed, or the engine has died."""


class PoolCard(Described):
    id: str
    """Name of the model."""
    object: Literal["model"]
    """The kind of object."""
    created: int
    """Time at which the server was started, in seconds since 1970."""
    owned_by: str
    """Always "toolkit-lm"."""
    root: str
    """The checkpoint, or an adapter's folder, as the operator gave it."""
    parent: str | None
    """The model that an alias or adapter stands for. null: the model itself."""
    max_model_len: int | None
    """Most tokens of prompt and output together. null: the checkpoint could not be read."""
    aliases: list[str]
    """Further names of the model."""
    state: StateName
    """State of the model."""
    reason: str | None
    """Reason of a failure. null: there is none."""
    progress: int | None
    """Share of the load or the waking up that is done, in percent, as estimated. null: there is
    none."""
    status: LlamaStatus
    """The same, as llama.cpp's router tells it."""
    bytes_needed: int | None
    """Bytes of the budget that the model takes once it is loaded. null: they are not known."""
    bytes_resident: int
    """Bytes that its processes took at the last look."""
    requests_in_flight: int
    """Requests that it answers."""
    requests_waiting: int
    """Requests that wait until it is loaded."""
    loads: int
    """How often it was loaded."""
    evictions: int
    """How often it made room for another model."""
    sleeps: int
    """How often it fell asleep."""
    sleep_level: int | None
    """What it gave up for its sleep: the KV cache (1), or the weights, too (2). null: it is not
    asleep."""
    failures: int
    """How often a start has failed, or the engine has died."""
    pinned: bool
    """It is never unloaded."""


class PoolList(Described):
    object: Literal["list"]
    """The kind of object."""
    data: list[PoolCard]
    """The models, whether they are loaded or not, under each of their names."""


class Done(Described):
    success: bool
    """The request was carried out."""
    models: list[str]
    """Names of the models that it was about."""


class Sleeping(Described):
    is_sleeping: bool
    """The model is asleep."""


class Reloaded(Described):
    added: list[str]
    """Models that are new."""
    changed: list[str]
    """Models whose entries have changed."""
    removed: list[str]
    """Models that are served no more."""


class Running(Described):
    model: str
    """Name of the model."""
    state: Literal["starting", "ready", "asleep", "stopping"]
    """State of the model, by llama-swap's names."""
    progress: int | None
    """Share of the load or the waking up that is done, in percent, as estimated. null: there is
    none."""


class RunningList(Described):
    running: list[Running]
    """Models that are loaded or asleep, or are being loaded or unloaded."""


class Load(Described):
    server_load: int
    """Requests that are under way or wait for their model."""


class Version(Described):
    version: str
    """The version of toolkit-lm."""


class Details(Described):
    parent_model: str
    """Always empty."""
    format: str
    """Format of the weights."""
    family: str
    """Kind of the model, by its config.json."""
    families: list[str]
    """The same, as a list."""
    parameter_size: str
    """Always empty."""
    quantization_level: str
    """Always empty."""


class Tag(Described):
    name: str
    """Name of the model."""
    model: str
    """The same."""
    modified_at: str
    """Time at which the server was started."""
    size: int
    """Bytes of the weights."""
    digest: str
    """Digest of the name."""
    details: Details
    """Facts of the model."""


class Tags(Described):
    models: list[Tag]
    """The models, whether they are loaded or not."""


class RunningTag(Tag):
    expires_at: str
    """Time at which it is unloaded if it stays idle."""
    size_vram: int
    """Bytes of a GPU: always 0."""
    context_length: int
    """Most tokens of prompt and output together."""
    state: Literal["ready", "asleep"]
    """State of the model."""


class RunningTags(Described):
    models: list[RunningTag]
    """The models that are loaded or asleep."""


class Card(Described):
    modelfile: str
    """Always empty."""
    parameters: str
    """Always empty."""
    template: str
    """Always empty before the model is loaded."""
    details: Details
    """Facts of the model."""
    model_info: dict[str, Any]
    """Sizes of the model."""
    capabilities: list[str]
    """Abilities of the model."""
    modified_at: str
    """Time at which the server was started."""
