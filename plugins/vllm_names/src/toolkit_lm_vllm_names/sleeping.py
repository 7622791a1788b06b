"""Pauses, sleeps and calls of workers by vLLM's names: those of toolkit_lm_rl."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import toolkit_lm
from toolkit_lm.errors import RequestError

if TYPE_CHECKING:
    from toolkit_lm_rl.control import AsyncControl, Control
    from toolkit_lm_rl.share import PauseMode


class Sleeps(toolkit_lm.LLM):
    """An LLM that gives memory back for a while, and takes new weights."""

    _has_staged = False

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Gives memory back, and refuses requests until `wake_up`. Level 1: the KV cache, and the
        weights of a GPU, which move to the host. Level 2: the KV cache and the weights. Raises
        RequestError for another level."""
        self._finish_weights()
        self._control.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Brings back "weights", "kv_cache" and "scheduling", or some of them. Returns whether the
        engine is wholly awake."""
        self._finish_weights()
        return self._control.wake_up(tags)

    def stage_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Takes tensors of the next weights, which the engine changes to before it is asked for
        anything else."""
        self._control.stage(weights)
        self._has_staged = True

    def _finish_weights(self) -> None:
        if self._has_staged:
            self._has_staged = False
            self._control.change()

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the class `worker_extension_cls` on all workers, and returns what each
        answers. Raises RequestError for a timeout, which only an AsyncLLM keeps."""
        if timeout is not None:
            raise RequestError("timeout must be None: only an AsyncLLM keeps one.", "timeout")
        return self._control.collective_rpc(method, args, kwargs)

    @property
    def _control(self) -> Control:
        from toolkit_lm_rl.control import Control

        return Control(self)


class SleepsAsync(toolkit_lm.AsyncLLM):
    """An AsyncLLM that pauses, and gives memory back for a while."""

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """Pauses the engine, once running requests have ended ("abort", "wait"), or with them
        ("keep"). `wait_for_inflight_requests`: the older name of "wait". `clear_cache`: cached
        prefixes are forgotten, except with "keep"."""
        if wait_for_inflight_requests:
            mode = "wait"
        await self._control.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await self._control.resume()

    async def is_paused(self) -> bool:
        """Whether the engine is paused or asleep."""
        return (await self._control.state()).is_paused

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Gives memory back, as `LLM.sleep` does. `mode`: what becomes of running requests."""
        await self._control.sleep(level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Brings back what a sleep gave away. Returns whether the engine is wholly awake."""
        return await self._control.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether the engine is asleep."""
        return bool((await self._control.state()).asleep)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Calls a method of the class `worker_extension_cls` on all workers, and returns what each
        answers. Raises TimeoutError after `timeout` seconds; the workers go on."""
        call = self._control.collective_rpc(method, args, kwargs)
        return await asyncio.wait_for(call, timeout)

    @property
    def _control(self) -> AsyncControl:
        from toolkit_lm_rl.control import AsyncControl

        return AsyncControl(self)
