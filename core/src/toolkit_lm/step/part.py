"""StepPart: the worker's half of a part, which brings data other than tokens into a step."""

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
"""Requirements of a layer other than the KV cache. "sequences": whole sequences, for a layer that
caches nothing. "encoder_cache": keys and values of an encoder sequence, for cross attention."""


class StepRun(ABC):
    """Interface of the runner that parts use during a step."""

    @abstractmethod
    def sequences(self, lengths: Sequence[int]) -> AbstractContextManager[None]:
        """In the context `with step.sequences(lengths):`, attention of type ENCODER treats the flat
        batch as sequences of these lengths. Entering again is cheap."""

    @abstractmethod
    def tap(self, layer: str) -> Tensor:
        """Returns [T, H]: the output of a layer that the part names in `taps`, for the step's
        tokens. It is valid until the next step. For `finish`; earlier pipeline stages do not have
        it."""

    @abstractmethod
    def forward(
        self,
        model: nn.Module,
        rows: np.ndarray,
        tokens: Sequence[np.ndarray],
        start: np.ndarray,
        **arguments: Tensor,
    ) -> Tensor:
        """Runs a second pass over the step's block tables. Returns flat hidden states, as `model`
        computes them.

        `rows` [N]: indices into the step's rows, `inputs.rows`. `tokens`: token ids of each row
        from index `start` [N] on; their keys and values overwrite the present ones.
        `model(input_ids, positions, **arguments)` has layers of the part or of the target. For
        `finish`. Raises ValueError beyond max_model_len, and for tokens without slots. The part's
        layers have `lookahead` slots after the step's own tokens; the target's layers have none.
        """

    @abstractmethod
    def draw(
        self, logits: Tensor, rows: np.ndarray, ahead: int, after: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns [N] tokens that the model would sample from logits [N, V] if they were its own,
        as a later step samples them. Changes no state. For `finish`.

        `rows` as in `forward`. `ahead`: number of tokens between those that the step has sampled
        and this one; `after` [N, ahead]: these tokens. A row's sample is a function of its logits,
        its parameters, its tokens and one number u in [0, 1). The row's seed and the token's index
        in the output determine u. Greedy rows take the likeliest token. Others take the first token
        whose cumulative probability, in the order of token ids, exceeds u. A drafter with the
        model's logits is therefore always right. Plugins' logits processors are not called, since
        they keep state.
        """


class StepPart:
    """A worker's state of sequences other than their tokens and KV cache, and its work in steps:
    media, an encoder, a pooler, a drafter, an adapter.

    There is one per worker process, on the pipeline stages that `ranks` names, and on all their
    tensor parallel ranks. All ranks run the same plans, so they call the same methods in the same
    order: a method may use collectives. Methods are called in the thread that computes steps. Only
    those that a subclass overrides are called. An exception fails the step on all ranks. R rows, T
    tokens, H hidden size.
    """

    ranks: ClassVar[Literal["all", "first_stage", "last_stage"]] = "all"
    """Pipeline stages whose workers have the part. Only the last stage calls `finish`, and only its
    answers reach the planner."""
    feeds: ClassVar[frozenset[Feed]] = frozenset()
    """Requirements of the model's layers that the part meets. Layers that need whole "sequences"
    then run only inside `step.sequences`, and not in the forward pass."""
    asks: ClassVar[Sequence[str]] = ()
    """Methods of the model that the part calls. A model that lacks one of them is refused."""
    encodes: ClassVar[bool] = False
    """`begin` computes with the model, so that it is called after that of other parts."""
    lookahead: int = 0
    """Slots of the part's own layers beyond the tokens of a step, for `StepRun.forward`. Read once,
    after the constructor."""
    calls_modules: bool = False
    """The step's forward pass must call the model's modules, even if the model is compiled. Read in
    each step, after `groups`."""
    taps: Sequence[str] = ()
    """Names of model layers ("model.layers.3") whose outputs `step.tap` returns: hidden states with
    the residual, before any following norm.

    Read once, after the constructor, which may set it. On a pipeline stage without the part, the
    value of `taps_of` is used.
    """
    reads_taps: bool = True
    """`step.tap` is called in this step. Read in each step, after `begin`."""
    buffers: Mapping[str, tuple[Literal["token", "row"], torch.dtype]] = MappingProxyType({})
    """Buffers that `context` fills for each token or row of a step, by name. Layers and linear
    methods read them with `toolkit_lm.attention.slots(name)`. Read once, after the constructor.
    Names must be unique among parts."""

    def __init__(
        self,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        *,
        plugins: Plugins,
        options: Any,
    ) -> None:
        """Called once, after the model has loaded its weights. `options`: options of the plugin
        that brings the part, or None."""
        self.model: Any = model
        self.config = config
        self.device = device
        self.plugins = plugins
        self.options = options

    @classmethod
    def taps_of(
        cls, model: nn.Module, config: VllmConfig, *, plugins: Plugins, options: Any
    ) -> Sequence[str]:
        """Returns the names in `taps`, on a pipeline stage that does not make the part. Arguments
        as of the constructor. By default, the value of the class."""
        return cls.taps

    def load(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        """Called once, after the constructor. `weights()` reads the model's checkpoint again, as
        (name, full tensor, mapped from disk)."""

    def layers(self) -> Mapping[str, CacheLayer]:
        """Called once, after `load`. Returns the part's own layers that use the KV cache, by their
        `prefix`, which begins with the part's name and "/". Their memory is planned with the
        model's."""
        return {}

    def facts(self) -> Raw:
        """Called once, after `layers`. Returns data for the part's planner, as msgpack; nil:
        none."""
        return Raw(b"\xc0")

    def reserved_bytes(self) -> int:
        """Bytes of the device that the part will use, other than the KV cache and the memory of the
        example's step. Called if the cache gets a share of the memory."""
        return 0

    def example(self, plan: StepPlan) -> None:
        """Adds the part's largest usual work to a made-up plan, which has its sequences already. It
        is used for the warm-up, and to measure a step's memory. Encoders get their tables later."""

    def add(self, seq: NewSequence) -> None:
        """A sequence joins the batch: admitted, forked, or resumed after a preemption. Called once,
        even if the part knows the sequence from before."""

    def remove(self, seq_id: int) -> None:
        """A sequence leaves the batch: finished or preempted. Unknown ones must be accepted."""

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        """Called in each step before anything is computed, and also in steps without rows. Handles
        the planner's data in `plan.parts`.

        Returns the part's answer for `StepResult.parts`, unless `finish` returns another.
        """

    def groups(self, inputs: StepInputs) -> None:
        """Changes the inputs of KV groups, in place."""

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """Returns arguments of the forward pass, on the device: further ones, or others in place of
        `positions` ([T] or [3, T] int64)."""
        return {}

    def context(self, inputs: StepInputs, buffers: Mapping[str, np.ndarray]) -> None:
        """Fills the part's `buffers`, by name, before the forward pass. They are [T] or [R] arrays
        on the host that keep their values between steps. Slots of a graph's padding are 0."""

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> Raw | None:
        """Receives a step's hidden states [T, H] after its tokens are sampled. May set
        `result.drafts`, `result.pooled` or `result.errors`, by seq_id. Returns the part's
        answer."""

    def close(self) -> None:
        """Called once, when the worker ends. Releases the part's resources."""
