"""CUDA graphs: forward passes of fixed sizes are captured once. Later steps are padded and replay
them."""

from __future__ import annotations

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from toolkit_lm.attention import BatchLimits, GraphSupport
from toolkit_lm.config import OPAQUE_OPS, CompilationOptions, VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import GraphShape, Model
from torch import Tensor

from toolkit_lm_compile.dispatch import NO_GRAPH, Dispatcher, Kind, Mode, Run, default_sizes, settle
from toolkit_lm_compile.memory import Memory
from toolkit_lm_compile.program import Program
from toolkit_lm_compile.replay import Passes, Replay, Whole, pad, token_axis

logger = logging.getLogger(__name__)

_OF_SEQUENCES = {"toolkit_lm::attention", "toolkit_lm::cache_layer"}
"""Ops whose kernels depend on the rows of a step, so that parts end at them."""
_OTHER_LENGTHS = ("encoder_hidden_states", "intermediate")
"""Arguments whose length is not the number of tokens."""


class Recorder(ABC):
    """Recorder of the kernels that a function launches."""

    @abstractmethod
    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        """Records `work` and returns a function that launches it again, in the same memory.

        `work` runs at least once, and has the same effect however often it runs.
        """

    def forget(self) -> None:  # noqa: B027
        """Drops the recordings, which are not launched any more."""

    @abstractmethod
    def free_memory(self) -> int:
        """Free bytes of the device, once cached memory is released."""


class CudaRecorder(Recorder):
    """Recorder of PyTorch's CUDA graphs. All share one memory pool, since nothing in it is read
    after a replay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        # A pool ends with the last of its graphs.
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], object]) -> Callable[[], object]:
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Kernels are loaded and tuned, and workspaces allocated, when they first run. A graph
            # must not hold that.
            work()
            self._stream.synchronize()
            # Other threads of the host app may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        here.wait_stream(self._stream)
        return graph.replay

    def free_memory(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])


def make_recorder(device: torch.device) -> Recorder | None:
    """Makes the device's recorder. None: the device has no CUDA graphs."""
    return CudaRecorder(device) if device.type == "cuda" else None


def asked_for(
    options: CompilationOptions, config: VllmConfig, *, can_record: bool
) -> tuple[Mode, str | None]:
    """The mode that the options ask for. If there are no graphs all the same, NONE and the
    reason."""
    asked = Mode(options.cudagraph_mode)
    if asked is Mode.NONE:
        return asked, None
    if not can_record:
        return Mode.NONE, f"there are no CUDA graphs on {config.device.device}"
    if config.parallel.num_ranks > 1:
        return Mode.NONE, "graphs are for models of one rank"
    if not _OF_SEQUENCES <= {*options.splitting_ops} <= {*OPAQUE_OPS}:
        return (
            Mode.NONE,
            (
                f"graphs need splitting_ops with {' and '.join(sorted(_OF_SEQUENCES))}, and none "
                f"but {', '.join(OPAQUE_OPS)}"
            ),
        )
    return asked, None


def make_graphs(model: Model, options: CompilationOptions, config: VllmConfig) -> Graphs | None:
    """Makes the model's graphs. None: the config or the device allows none."""
    device = torch.device(config.device.device)
    recorder = None if Mode(options.cudagraph_mode) is Mode.NONE else make_recorder(device)
    mode, reason = asked_for(options, config, can_record=recorder is not None)
    if reason is not None:
        logger.warning("cudagraph_mode %s: %s. It is none.", options.cudagraph_mode, reason)
    return (
        Graphs(model, options, mode, recorder, device)
        if recorder is not None and mode is not Mode.NONE
        else None
    )


def describe(
    options: CompilationOptions, config: VllmConfig, supports: Mapping[str, GraphSupport | str]
) -> str:
    """Describes the CUDA graphs for `toolkit explain`."""
    mode, reason = asked_for(
        options, config, can_record=torch.device(config.device.device).type == "cuda"
    )
    if mode is not Mode.NONE:
        mode, reason = settle(mode, supports)
    return (
        f"CUDA graphs: {mode}"
        if reason is None
        else f"CUDA graphs: {mode}, not {options.cudagraph_mode}: {reason}"
    )


def sizes_for(options: CompilationOptions, limits: BatchLimits) -> list[int]:
    """The capture sizes that a step can reach, as ascending numbers of tokens."""
    if options.cudagraph_capture_sizes is None:
        return default_sizes(limits)
    return sorted({size for size in options.cudagraph_capture_sizes if size <= limits.num_tokens})


class Graphs:
    """The graphs of one model."""

    def __init__(
        self,
        model: Model,
        options: CompilationOptions,
        mode: Mode,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self.asked = mode
        self.mode = Mode.NONE
        """The mode in effect: `asked` as far as the attention backends allow it."""
        self.num_replays: Counter[Kind] = Counter()
        """Number of steps by how they ran."""
        self._options = options
        self._recorder = recorder
        self._device = device
        self._whole_is_possible = "encoder" not in model.parts
        self._reason: str | None = None
        self._run = NO_GRAPH
        self._num_tokens = 0
        self._forced: Run | None = None
        self._forget()

    def bind(self, limits: BatchLimits, supports: Mapping[str, GraphSupport | str]) -> None:
        """Chooses the mode. Graphs captured before are dropped, since the KV cache is a new one."""
        self._forget()
        if not self._whole_is_possible:
            supports = dict.fromkeys(supports, GraphSupport.NEVER)
        self.mode, reason = settle(self.asked, supports)
        if not self._whole_is_possible and reason is not None:
            reason = (
                "steps of encoder-decoder models differ in what they bring of encoders, so "
                "attention stays outside"
            )
        if reason is not None and reason != self._reason:
            logger.warning("cudagraph_mode %s: %s. It is %s.", self.asked, reason, self.mode)
        self._reason = reason
        support = min(map(GraphSupport.of, supports.values()), default=GraphSupport.NEVER)
        self._dispatcher = Dispatcher(
            self.mode,
            support,
            sizes_for(self._options, limits),
            limits,
            self._options.cudagraph_query_len,
        )

    def estimate(self, step: Callable[[], object]) -> int:
        """Estimates the bytes that `capture` will take.

        Only the two largest graphs of each kind are captured. Further ones count as much as the
        second.
        """
        total = 0
        seen = Counter[tuple[Kind, int]]()
        runs = self._dispatcher.graphs()
        counts = Counter(_sort(run) for run in runs)
        with _capturing():
            for run in runs:
                sort = _sort(run)
                seen[sort] += 1
                if seen[sort] > 2:
                    continue
                before = self._recorder.free_memory()
                self._capture(run, step)
                taken = max(0, before - self._recorder.free_memory())
                total += taken if seen[sort] == 1 else taken * (counts[sort] - 1)
        self._forget()
        self._recorder.free_memory()
        return total

    def capture(self, step: Callable[[], object]) -> None:
        """Captures all graphs, if they are not captured yet."""
        runs = [] if self._passes else self._dispatcher.graphs()
        if not runs:
            return
        start = time.perf_counter()
        before = self._recorder.free_memory()
        with _capturing():
            for run in runs:
                self._capture(run, step)
        taken = (before - self._recorder.free_memory()) / 2**20
        seconds = time.perf_counter() - start
        logger.info(
            "CUDA graphs: %s, %d captured in %.1f s, %.0f MiB",
            self.mode,
            len(self._passes),
            seconds,
            taken,
        )
        if not self._passes:
            logger.warning(
                "no CUDA graph was captured: no forward pass of the warm-up has one entry for "
                "each token in all its arguments"
            )
        self.num_replays.clear()

    def begin_step(
        self, num_rows: int, num_tokens: int, max_query_len: int, *, whole: bool
    ) -> GraphShape | None:
        """Chooses how the next step runs: see ModelCompiler.begin_step."""
        run = self._forced or self._dispatcher.dispatch(
            num_rows, num_tokens, max_query_len, whole=whole
        )
        if run.kind is Kind.FULL and not whole:
            run = NO_GRAPH
        self._run = run
        self._num_tokens = num_tokens
        return (
            GraphShape(run.num_rows, run.num_tokens, run.max_query_len)
            if run.kind is Kind.FULL
            else None
        )

    def __call__(
        self,
        form: Hashable,
        arguments: Mapping[str, Tensor],
        program: Program | None,
        compute: Callable[[Mapping[str, Tensor]], Any],
    ) -> Any:
        """Runs a forward pass as `begin_step` has chosen.

        `compute` runs it without a graph. `program` holds what a graph can record. None: the pass
        has no program.
        """
        run = self._run
        num_tokens = self._num_tokens
        replay = self._passes.get((form, run)) if run.kind is not Kind.NONE else None
        if (
            replay is None
            and self._forced is not None
            and run is self._forced
            and program is not None
            and _is_by_token(arguments, num_tokens)
        ):
            replay = self._passes[form, run] = self._record(program, run, arguments)
        self.num_replays[Kind.NONE if replay is None else run.kind] += 1
        if replay is not None:
            return replay(num_tokens, arguments)
        if run.kind is Kind.FULL:
            # Attention has been told of the padding already.
            return compute(
                {
                    name: pad(name, value, num_tokens, run.num_tokens)
                    for name, value in arguments.items()
                }
            )[:num_tokens]
        return compute(arguments)

    def _record(self, program: Program, run: Run, arguments: Mapping[str, Tensor]) -> Replay:
        kind = Whole if run.kind is Kind.FULL else Passes
        return kind(
            program,
            run.num_tokens,
            arguments,
            self._num_tokens,
            self._memory,
            self._recorder.record,
        )

    def _capture(self, run: Run, step: Callable[[], object]) -> None:
        self._forced = run
        try:
            step()
        except Exception as error:
            problem = f"a CUDA graph ({run.kind}, {run.num_tokens} tokens) cannot be captured"
            raise UnsupportedError(
                f"{problem}: {error}. Use another cudagraph_mode, or another attention backend."
            ) from error
        finally:
            self._forced = None

    def _forget(self) -> None:
        self._passes: dict[tuple[Hashable, Run], Replay] = {}
        self._memory = Memory(self._device)
        self._recorder.forget()


def _sort(run: Run) -> tuple[Kind, int]:
    """The class of a graph. Graphs of one class differ only in size."""
    is_uniform = run.num_rows * run.max_query_len == run.num_tokens
    return run.kind, run.max_query_len if is_uniform else 0


def _is_by_token(arguments: Mapping[str, Tensor], num_tokens: int) -> bool:
    return all(
        name not in _OTHER_LENGTHS and value.shape[token_axis(name, value)] == num_tokens
        for name, value in arguments.items()
    )


@contextmanager
def _capturing() -> Iterator[None]:
    """Keeps the garbage collector off during a capture, since it could free memory of the
    device."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
