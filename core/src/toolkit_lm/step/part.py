"""StepPart: what enters a step beside tokens, on the worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from msgspec import Raw
from torch import Tensor, nn

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import NewSequence, StepPlan, StepResult
from toolkit_lm.plugin import Plugins
from toolkit_lm.step.inputs import StepInputs

Feed = Literal["sequences", "encoder_cache"]
"""Beside the KV cache, what a layer may need: whole sequences, where it caches nothing, or the keys
and values of an encoder sequence, which cross attention reads."""


class StepRun(ABC):
    """What a part may ask of its runner while a step runs."""

    @abstractmethod
    def sequences(self, lengths: Sequence[int]) -> AbstractContextManager[None]:
        """Inside `with step.sequences(lengths):`, attention of type ENCODER has a flat batch of
        sequences of these lengths. Entering again is cheap."""

    @abstractmethod
    def tap(self, layer: str) -> Tensor:
        """[T, H]: what a layer that the part names in `taps` has given for the step's tokens, until
        the next step. For `finish`; the stages before that layer do not have it."""

    @abstractmethod
    def forward(
        self,
        model: nn.Module,
        rows: np.ndarray,
        tokens: Sequence[np.ndarray],
        start: np.ndarray,
        **arguments: Tensor,
    ) -> Tensor:
        """A second pass over the step's block tables: hidden states, flat, as `model` gives them.

        `rows` [N]: places in the step's rows, `inputs.rows`. `tokens`: of each, the token ids from
        index `start` [N] on; what they write takes the place of what was there. `model(input_ids,
        positions, **arguments)` has layers of the part's own, or the target's. For `finish`. Raises
        ValueError beyond max_model_len, and for tokens without slots: those after the step's own
        are as many as the part's `lookahead`, and the target's layers have none.
        """

    @abstractmethod
    def draw(
        self, logits: Tensor, rows: np.ndarray, ahead: int, after: np.ndarray | None = None
    ) -> np.ndarray:
        """[N] the tokens that the model would draw from logits [N, V], were they its own, as a
        later step draws them. It changes no state. For `finish`.

        `rows` as in `forward`. `ahead`: how many tokens are drawn before this one, after those that
        the step has drawn; `after` [N, ahead]: these. A row's draw is a function of its logits,
        its parameters, its tokens and one number u in [0, 1) that its seed and the place of the
        token in its output give. Greedy rows take the likeliest token. Others take the first whose
        cumulative probability, in the order of token ids, exceeds u: so a drafter whose logits are
        the model's is always right. Plugins' logits processors are not asked: they keep state.
        """


class StepPart:
    """What a worker keeps of sequences beside their tokens and KV cache, and does in its steps:
    media, an encoder, a pooler, a drafter, an adapter.

    One of each is made per worker process, on the pipeline stages that `ranks` names, and on all
    tensor parallel ranks of them. All ranks call the same methods in the same order, since all run
    the same plans: a method may use the groups of ranks. Methods are called in the thread that
    computes steps. Only those that a subclass overrides are called. What one raises fails the step
    on all ranks. R rows, T tokens, H hidden size.
    """

    ranks: ClassVar[Literal["all", "first_stage", "last_stage"]] = "all"
    """The pipeline stages whose workers have the part. Only the last one has `finish` called, and
    only its answers reach the planner."""
    feeds: ClassVar[frozenset[Feed]] = frozenset()
    """What the part gives to layers of the model that need more than the KV cache. Those that need
    whole "sequences" then run inside `step.sequences` alone, and not in the forward pass."""
    asks: ClassVar[Sequence[str]] = ()
    """Methods of the model that the part calls: a model without one of them is refused."""
    lookahead: int = 0
    """Slots that the part's own layers have beyond the tokens of a step, for `StepRun.forward`.
    Read once, after the constructor."""
    taps: Sequence[str] = ()
    """Names of layers of the model ("model.layers.3") whose hidden states `step.tap` is to give:
    what a layer puts out, with the residual, before any norm that follows.

    Read once, after the constructor, which may set it; where a pipeline stage does not have the
    part, that of its class."""
    buffers: Mapping[str, tuple[Literal["token", "row"], torch.dtype]] = MappingProxyType({})
    """By name, what `context` says of each token or row of a step: layers and linear methods read
    it with `toolkit_lm.attention.slots(name)`. Read once, after the constructor. Parts must give
    them different names."""

    def __init__(
        self,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        *,
        plugins: Plugins,
        options: Any,
    ) -> None:
        """Once, when the model has its weights. `options`: of the plugin that brings the part; None
        where it has none."""
        self.model: Any = model
        self.config = config
        self.device = device
        self.plugins = plugins
        self.options = options

    def load(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """Once, next: `weights()` reads the model's checkpoint again, as (name, full tensor, mapped
        from disk)."""

    def layers(self) -> Mapping[str, CacheLayer]:
        """Once, next: layers of the part's own that use the KV cache, by their `prefix`, which
        begins with the part's name and "/". Their memory is planned with the model's."""
        return {}

    def facts(self) -> Raw:
        """Once, next: what the part's planner is to know of it, in msgpack; nil: nothing."""
        return Raw(b"\xc0")

    def reserved_bytes(self) -> int:
        """Bytes of the device that the part will take beside the KV cache and what a step of the
        example takes. Asked where the cache gets a share of the memory."""
        return 0

    def example(self, plan: StepPlan) -> None:
        """Adds the part's largest usual work to a made-up plan, which has its sequences already:
        for the warm-up, and to see what memory a step takes. Encoders get their tables later."""

    def add(self, seq: NewSequence) -> None:
        """A sequence joins the batch: admitted, forked, or back from a preemption. Called once even
        if the part has heard of it before."""

    def remove(self, seq_id: int) -> None:
        """A sequence leaves the batch: ended or preempted. Unknown ones are no error."""

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        """In each step, before anything is computed, and also in one without rows: does what the
        planner has put into `plan.parts`.

        What it returns is the part's answer, `StepResult.parts`, unless `finish` gives another.
        """

    def groups(self, inputs: StepInputs) -> None:
        """Changes what KV groups see, in place."""

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Arguments of the forward pass, on the device: further ones, or others in place of
        `positions` ([T] or [3, T] int64)."""
        return {}

    def context(self, inputs: StepInputs, buffers: Mapping[str, np.ndarray]) -> None:
        """Fills the part's `buffers`, by name, before the forward pass: [T] or [R] arrays on the
        host, which hold what they held before. Slots of a graph's padding are 0."""

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> Raw | None:
        """Takes a step's hidden states [T, H], when its tokens are drawn: sets `result.drafts`,
        `result.pooled` or `result.errors`, by seq_id. What it returns is the part's answer."""

    def close(self) -> None:
        """Once, when the worker ends: releases what the part holds."""
