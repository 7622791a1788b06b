"""Controls of an engine: those of an LLM, and those of an AsyncLLM or of a server's engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit_lm.errors import RequestError

from toolkit_lm_rl.front import refuse_requests
from toolkit_lm_rl.share import (
    PART,
    TAGS,
    Call,
    Pause,
    PauseMode,
    SavedState,
    Sleep,
    Staged,
    State,
    Tag,
    Update,
    WakeUp,
)

if TYPE_CHECKING:
    from toolkit_lm import LLM, AsyncLLM
    from toolkit_lm_serving.engine import ServingEngine
    from torch import Tensor

Answer = TypeVar("Answer")

_POLL_SECONDS = 0.01
_PAUSED = "the engine is paused or asleep: resume() or wake_up() comes before requests."


def _tags(tags: Sequence[str] | None) -> WakeUp:
    known: list[Tag] = [tag for tag in TAGS if tag in (tags or ())]
    for tag in tags or ():
        if tag not in TAGS:
            raise RequestError(f"tags: {tag!r} is none of {', '.join(TAGS)}.", "tags")
    return WakeUp(None if tags is None else known)


def _call(method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Call:
    from toolkit_lm_rl.values import packed

    if not isinstance(method, str):
        raise RequestError(
            "method: name a method of the class rl.worker_extension_cls. Functions are not sent.",
            "method",
        )
    return Call(method, packed([*args], "args"), packed(kwargs or {}, "kwargs"))


def _answers(found: Sequence[Any]) -> list[Any]:
    """Answers of all ranks; of several engines, one engine's after the other's."""
    from toolkit_lm_rl.values import unpacked

    return [unpacked(value) for engine in found for value in engine]


class Control:
    """Controls an LLM, in the process of the caller or in one of its own.

    control = Control(llm)
    control.sleep(level=1)
    control.wake_up()
    control.load_weights(policy.named_parameters())
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def state(self) -> State:
        """The state of the engine; of the first, if there are several."""
        return self._call("state")

    def pause(self) -> None:
        """Pauses the engine. Requests are refused until `resume`."""
        self._call("pause", Pause("keep"))

    def resume(self) -> None:
        """Ends a pause."""
        self._call("resume")

    def sleep(self, level: int = 1, mode: PauseMode = "abort", *, keep: bool = False) -> bool:
        """Gives memory back, and refuses requests until `wake_up`. Level 0: none. Level 1: the KV
        cache, and the weights of a GPU, which move to the host. Level 2: the KV cache and the
        weights, which `wake_up` reads again from the checkpoint. Nothing runs in an LLM that is
        called, so that `mode` has no effect.

        `keep`: at level 2, the weights of a CPU are written to a temporary file as they are in
        memory, and `wake_up` copies them back, which is much faster. It is written once, has no
        name, and ends with the engine. Where no disk has room, the checkpoint is read. Returns
        whether the weights are kept. Raises RequestError for another level."""
        return self._call("sleep", Sleep(level, mode, keep)).keeps_weights

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Brings back "weights", "kv_cache" and "scheduling", or some of them. Returns whether the
        engine is wholly awake."""
        return not self._call("wake_up", _tags(tags)).asleep

    def is_sleeping(self) -> bool:
        return bool(self.state().asleep)

    def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: str | None = None
    ) -> str:
        """Changes the weights in place: tensors by the checkpoint's names, whole, of any device and
        floating dtype. Weights that are not given stay. Returns the version.

        All keys and values of the old weights are forgotten. Raises CheckpointError, with which
        nothing is changed, for names or shapes that the model does not have.
        """
        self.stage(weights)
        return self.change(version)

    def stage(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes tensors of new weights, for `change`. If the iterable raises, all tensors that were
        taken for it are forgotten."""
        from toolkit_lm_rl.sending import sent

        try:
            with sent(weights) as paths:
                for path in paths:
                    self._llm.call_workers(f"{PART}.stage", Staged(path, owned=True))
        except BaseException:
            self._llm.call_workers(f"{PART}.discard")
            raise

    def change(self, version: str | None = None) -> str:
        """Changes the weights to the tensors that were taken. Returns the version."""
        return self._call("change", Update(version)).weight_version

    def update_weights(self, path: str, version: str | None = None) -> str:
        """Changes the weights, as `load_weights` does, to those of a file in the format of
        safetensors, or of all such files of a folder. Each worker reads it: a path below /dev/shm
        is shared memory."""
        self._llm.call_workers(f"{PART}.stage", Staged(path))
        return self.change(version)

    def save_sharded_state(self, path: str, max_size: int | None = None) -> None:
        """Writes what each rank has of the present weights into a folder, which the load format
        sharded_state reads. Config and tokenizer are not written. `max_size`: bytes after which a
        rank begins another file. Each rank makes its model once more for it. Raises
        UnsupportedError for quantized weights."""
        self._llm.call_workers(f"{PART}.save_sharded_state", SavedState(path, max_size))

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method of the class `rl.worker_extension_cls` on all workers, and returns what
        each answers. Arguments and answers are plain values, tensors and arrays, at most 16 MiB.
        Raises RequestError, and ToolkitError for what the method raises."""
        call = _call(method, args, kwargs)
        return _answers(self._llm.call_workers(f"{PART}.collective_rpc", call, list[Any]))

    @property
    def weight_version(self) -> str:
        """Version of the weights; empty: those of the checkpoint."""
        return self.state().weight_version

    def _call(self, method: str, payload: object = None) -> State:
        states = self._llm.call_workers(f"{PART}.{method}", payload, State)
        refuse_requests(self._llm.engine.processor, _PAUSED if states[0].is_paused else None)
        return states[0]


class AsyncControl:
    """Controls an AsyncLLM, or the engine of a server. Requests that come in a pause wait for its
    end."""

    def __init__(self, engine: AsyncLLM | ServingEngine) -> None:
        self._engine = engine

    async def state(self) -> State:
        """The state of the engine; of the first, if there are several."""
        return await self._call("state")

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> None:
        """Pauses the engine, once running requests have ended ("abort", "wait"), or with them
        ("keep"). `clear_cache`: cached prefixes are forgotten, except with "keep"."""
        await self._paused(mode)
        if clear_cache and mode != "keep":
            await self._engine.reset_prefix_cache()

    async def resume(self) -> None:
        """Ends a pause."""
        await self._call("resume")

    async def sleep(self, level: int = 1, mode: PauseMode = "abort", *, keep: bool = False) -> bool:
        """Gives memory back, as `Control.sleep` does. `mode`: what becomes of running requests.
        Returns whether all weights are kept in files."""
        if mode == "wait":
            await self._drained()
        states = await self._states("sleep", Sleep(level, mode, keep))
        if mode == "wait":
            await self._call("resume")
        return all(state.keeps_weights for state in states)

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Brings back what a sleep gave away, as `Control.wake_up` does."""
        return not (await self._call("wake_up", _tags(tags))).asleep

    async def stage(self, path: str, *, owned: bool = False) -> None:
        """Has workers read a file of tensors for the next update."""
        await self._engine.call_workers(f"{PART}.stage", Staged(path, owned))

    async def discard(self) -> None:
        """Forgets the tensors that were read for the next update."""
        await self._engine.call_workers(f"{PART}.discard")

    async def update(self, version: str | None = None) -> str:
        """Changes the weights to those that were read. Running requests go on with them. Returns
        the version."""
        return (await self._call("change", Update(version))).weight_version

    async def load_weights(
        self, weights: Iterable[tuple[str, Tensor]], version: str | None = None
    ) -> str:
        """Changes the weights, as `Control.load_weights` does. Running requests go on with them."""
        await self.stage_tensors(weights)
        return await self.update(version)

    async def stage_tensors(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes tensors for the next update, as `Control.stage` does."""
        from toolkit_lm_rl.sending import sent

        try:
            with sent(weights) as paths:
                while (path := await asyncio.to_thread(next, paths, None)) is not None:
                    await self.stage(path, owned=True)
        except BaseException:
            await self.discard()
            raise

    async def update_weights(self, path: str, version: str | None = None) -> str:
        """Changes the weights to those of a file or folder, as `Control.update_weights` does."""
        await self.stage(path)
        return await self.update(version)

    async def save_sharded_state(self, path: str, max_size: int | None = None) -> None:
        """Writes the present weights, as `Control.save_sharded_state` does."""
        await self._engine.call_workers(f"{PART}.save_sharded_state", SavedState(path, max_size))

    async def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Calls a method on all workers, as `Control.collective_rpc` does."""
        call = _call(method, args, kwargs)
        return _answers(await self._engine.call_workers(f"{PART}.collective_rpc", call, list[Any]))

    async def set_version(self, version: str) -> None:
        """Gives the present weights another name."""
        await self._call("set_version", version)

    async def _paused(self, mode: PauseMode) -> None:
        if mode == "wait":
            await self._drained()
            mode = "keep"
        await self._call("pause", Pause(mode))

    async def _drained(self) -> None:
        """Waits until what has begun has ended. Nothing else begins."""
        states = await self._states("pause", Pause("wait"))
        while any(state.num_begun for state in states):
            await asyncio.sleep(_POLL_SECONDS)
            states = await self._states("state")

    async def _call(self, method: str, payload: object = None) -> State:
        return (await self._states(method, payload))[0]

    async def _states(self, method: str, payload: object = None) -> list[State]:
        found: list[Any] = await self._engine.call_workers(f"{PART}.{method}", payload, State)
        return found
