"""The engine client contract: how a front, which knows texts, reaches an engine, which knows
tokens."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

from msgspec import Struct

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.engine.feature_mirror import FeatureMirror
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import EngineOutputs, EngineRequest, PoolingRules
from toolkit_lm.params import FinishReason


class EngineInfo(Struct, frozen=True, kw_only=True):
    """What a front learns of an engine that is ready."""

    config: VllmConfig
    """With nothing left open: the device, too, is settled."""
    kv_cache: KVCacheConfig
    pooling: dict[PoolingTask, PoolingRules]
    """The pooling tasks that it serves."""
    whole_items: bool = False
    """No chunk of a prompt ends inside an item of media."""


class EngineState(NamedTuple):
    """One of the engines behind a client."""

    status: Literal["starting", "ready", "restarting", "dead"]
    reason: str = ""
    """What it does while it starts, or why it is dead."""
    pid: int | None = None
    num_requests: int = 0
    """In flight."""
    num_tokens: int = 0
    """Of these, of prompts and outputs so far."""
    num_restarts: int = 0


class EngineClient(ABC):
    """One engine, in this process or in another; or several, which share the requests.

    Used from one thread at a time, but for `phase`, `engines`, `fork_error`, `wake` and
    `dump_stacks`. `add` and `finish` never wait for the engine. Every method but `finish` and
    `shutdown` raises EngineDeadError once the engine has died. Those that callers begin with,
    `wait_ready`, `add`, `reset_prefix_cache` and `poll_outputs`, do so in a fork as well.
    """

    phase: str = ""
    """What the engine does before it is ready."""
    engines: Sequence[EngineState] = ()
    """Of a client of several engines, each of them."""
    fork_error: EngineDeadError | None = None
    """Set in a fork of the process that made the engine: no thread and no socket of it works
    there."""

    def __init__(self, config: VllmConfig) -> None:
        os.register_at_fork(after_in_child=partial(_refuse_in_fork, weakref.ref(self), os.getpid()))
        self.features = FeatureMirror(config.cache.feature_cache_bytes)
        """What the engine holds of items of media."""

    @abstractmethod
    def wait_ready(self, timeout: float | None = None) -> EngineInfo | None:
        """Waits until the engine has loaded and warmed up. None when a `wake` or `timeout` seconds
        came first.

        Raises what kept it from starting: ToolkitError, with the root cause.
        """

    @property
    @abstractmethod
    def progress_time(self) -> float:
        """time.monotonic() of the engine's last sign of life: a step's end, an answer."""

    @abstractmethod
    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queues requests, which the front has checked: all of them, or none where it raises
        RequestError."""

    @abstractmethod
    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        """Ends a request, or one of its sequences, from outside. Unknown or ended ones are no
        error. No output follows."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that no running request uses."""

    @abstractmethod
    def step(self, timeout: float | None = None) -> EngineOutputs:
        """In this process: computes a step, if there is work. Else waits for what comes, a `wake`,
        or `timeout` seconds."""

    @abstractmethod
    def poll_outputs(self) -> EngineOutputs:
        """What has come without waiting or computing: events, outputs of steps that are over."""

    @abstractmethod
    def wake(self) -> None:
        """Lets a `step` or `wait_ready` that waits return, or else the next one. From any thread,
        and from a finalizer."""

    @abstractmethod
    def dump_stacks(self) -> None:
        """Writes what each of the engine's threads is doing to its standard error. From any
        thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the engine and releases what it holds. Safe to call twice."""


def _refuse_in_fork(reference: weakref.ref[EngineClient], pid: int) -> None:
    if (client := reference()) is None:
        return
    error = client.fork_error = EngineDeadError(
        f"the engine was made in process {pid} before os.fork(), and cannot be used in its child "
        f"{os.getpid()}. Make the engine in the "
        "child, or start the child with the spawn method: multiprocessing.get_context('spawn')."
    )

    def refuse(*_: Any) -> NoReturn:
        raise error

    for name in ("wait_ready", "add", "reset_prefix_cache", "poll_outputs"):
        setattr(client, name, refuse)
