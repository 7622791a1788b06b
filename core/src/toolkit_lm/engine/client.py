"""The engine client contract. Through it a front, which handles texts, reaches an engine, which
handles tokens."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

from msgspec import Raw, Struct

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.engine.feature_mirror import FeatureMirror
from toolkit_lm.errors import EngineDeadError, UnsupportedError
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import EngineOutputs, EngineRequest, PoolingRules
from toolkit_lm.params import FinishReason


class EngineInfo(Struct, frozen=True, kw_only=True):
    """Facts about an engine that is ready, for its front."""

    config: VllmConfig
    """The fully resolved config, with the device."""
    kv_cache: KVCacheConfig
    pooling: dict[PoolingTask, PoolingRules]
    """The pooling tasks that the engine serves."""
    whole_items: bool = False
    """No chunk of a prompt ends inside a multimodal item."""


class EngineState(NamedTuple):
    """State of one of the engines behind a client."""

    status: Literal["starting", "ready", "restarting", "dead"]
    reason: str = ""
    """Present phase of a starting engine, or the reason for which it is dead."""
    pid: int | None = None
    num_requests: int = 0
    """Number of requests in flight."""
    num_tokens: int = 0
    """Number of tokens of these requests, in prompts and outputs so far."""
    num_restarts: int = 0


class EngineClient(ABC):
    """One engine, in this process or in another; or several that share the requests.

    Used from one thread at a time, except for `phase`, `engines`, `fork_error`, `wake` and
    `dump_stacks`. `add` and `finish` never wait for the engine. Every method but `finish` and
    `shutdown` raises EngineDeadError once the engine has died. In a fork, `wait_ready`, `add`,
    `reset_prefix_cache` and `poll_outputs`, with which callers begin, raise it too.
    """

    phase: str = ""
    """Present phase of the engine's start, before it is ready."""
    engines: Sequence[EngineState] = ()
    """State of each engine, if the client has several."""
    fork_error: EngineDeadError | None = None
    """Set in a fork of the process that made the engine. The engine's threads and sockets do not
    work there."""

    def __init__(self, config: VllmConfig) -> None:
        os.register_at_fork(after_in_child=partial(_refuse_in_fork, weakref.ref(self), os.getpid()))
        self.features = FeatureMirror(config.cache.feature_cache_bytes)
        """Mirror of the multimodal data that the engine holds."""

    @abstractmethod
    def wait_ready(self, timeout: float | None = None) -> EngineInfo | None:
        """Waits until the engine has loaded and warmed up. Returns None if a `wake` or `timeout`
        seconds came first.

        Raises the ToolkitError that kept the engine from starting, with the root cause.
        """

    @property
    @abstractmethod
    def progress_time(self) -> float:
        """time.monotonic() of the engine's last sign of life: the end of a step, or an answer."""

    @abstractmethod
    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Queues requests that the front has validated: all of them, or none if it raises
        RequestError."""

    @abstractmethod
    def finish(
        self, request_id: str, reason: FinishReason = "abort", index: int | None = None
    ) -> None:
        """Ends a request, or one of its sequences, from outside. Unknown and finished ones are
        accepted. No output follows."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes that no running request uses."""

    def call_workers(self, method: str, payload: Raw) -> Future[list[Raw]]:
        """Calls a method of every worker, as EngineCore's, of each engine. Its future is done when
        a later `step` or `poll_outputs` has taken the answer in. By default it is refused."""
        raise UnsupportedError(
            f"{method}: the engine client {type(self).__name__} carries no calls to workers."
        )

    @abstractmethod
    def step(self, timeout: float | None = None) -> EngineOutputs:
        """Computes a step if there is work, for an engine in this process. Otherwise waits for
        messages, a `wake`, or `timeout` seconds."""

    @abstractmethod
    def poll_outputs(self) -> EngineOutputs:
        """Returns what has arrived, without waiting or computing: events, and outputs of finished
        steps."""

    @abstractmethod
    def wake(self) -> None:
        """Makes a waiting `step` or `wait_ready` return, or else the next one. May be called from
        any thread, and from a finalizer."""

    @abstractmethod
    def dump_stacks(self) -> None:
        """Writes the stacks of the engine's threads to its standard error. May be called from any
        thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the engine and releases its resources. Safe to call twice."""


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
