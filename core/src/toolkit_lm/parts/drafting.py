"""Drafting as a part of a step. A drafter's errors can neither change a token nor end a request."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import PluginError
from toolkit_lm.messages import NewSequence, StepPlan, StepResult
from toolkit_lm.plugin import Plugins, PluginWarning
from toolkit_lm.step import Drafter, GroupInputs, StepInputs, StepPart, StepRun


class DraftingPart(StepPart):
    """Asks a drafter for drafts. A drafter that fails is dropped with one warning: tokens are the
    same without it."""

    ranks = "last_stage"

    def __init__(
        self,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        *,
        plugins: Plugins,
        options: Any = None,
    ) -> None:
        """Makes the drafter that the config names. Raises PluginError if that fails."""
        super().__init__(model, config, device, plugins=plugins, options=options)
        name = config.scheduler.drafter
        assert name is not None, "the config names a drafter"
        self._name = name
        self._owner = plugins.drafters.get(name).owner
        self._vocab_size = config.vocab_size or np.inf
        self._drafter: Drafter | None = plugins.drafters.make(
            name, model, config, device, plugins=plugins, options=plugins.options(self._owner.name)
        )
        self.taps = self._drafter.taps
        self.buffers = self._drafter.buffers
        self.lookahead = self._drafter.lookahead
        for method in ("groups", "inputs"):
            if getattr(type(self._drafter), method) is not getattr(StepPart, method):
                raise PluginError(
                    f"{self._owner}: drafter {name!r} defines {method}(): a drafter has no say "
                    "in the model's forward pass."
                )

    def load(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        if self._drafter is not None:
            self._drafter.load(weights)

    def layers(self) -> Mapping[str, CacheLayer]:
        return {} if self._drafter is None else self._drafter.layers()

    def context(self, inputs: StepInputs, buffers: Mapping[str, np.ndarray]) -> None:
        self._guarded(lambda drafter: drafter.context(inputs, buffers))

    def begin(self, plan: StepPlan, step: StepRun) -> None:
        if plan.after_failure:
            self._agree()

    def example(self, plan: StepPlan) -> None:
        self._agree()

    def _agree(self) -> None:
        """Drops the drafter if another rank has dropped its own. Otherwise it would wait for that
        rank."""
        group = tensor_parallel_group(self.config.parallel)
        if group.size > 1:
            dropped = torch.tensor([float(self._drafter is None)], device=self.device)
            if group.all_reduce(dropped).item():
                self._drafter = None

    def add(self, seq: NewSequence) -> None:
        self._guarded(lambda drafter: drafter.add(seq))

    def remove(self, seq_id: int) -> None:
        self._guarded(lambda drafter: drafter.remove(seq_id))

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """Adds drafts to a step's result. The drafter gets copies, and arrays that it cannot write
        to."""
        if self._drafter is None:
            return
        own = StepResult(token_ids=[list(drawn) for drawn in result.token_ids])
        history = inputs.histories.token_ids
        history.flags.writeable = False
        try:
            _make_read_only(inputs)
            self._guarded(lambda drafter: drafter.finish(inputs, hidden_states, own, step))
            self._guarded(lambda drafter: self._check(drafter, inputs.plan, result, own.drafts))
        finally:
            history.flags.writeable = True
        if self._drafter is not None:
            result.drafts |= own.drafts

    def _check(
        self, drafter: Drafter, plan: StepPlan, result: StepResult, drafts: dict[int, list[int]]
    ) -> None:
        """Raises ValueError unless `drafts` are lists of the model's tokens, for sequences that
        have sampled one."""
        drawing = {
            row.seq_id for row, drawn in zip(plan.scheduled, result.token_ids, strict=True) if drawn
        }
        for seq_id, tokens in drafts.items():
            is_list = isinstance(tokens, list) and all(
                type(token) is int and 0 <= token < self._vocab_size for token in tokens
            )
            if not is_list or seq_id not in drawing:
                raise ValueError(
                    f"{type(drafter).__qualname__} has proposed {tokens!r}: no list of token ids "
                    "of a sequence that drew one"
                )

    def _guarded(self, call: Callable[[Drafter], object]) -> None:
        if self._drafter is None:
            return
        try:
            call(self._drafter)
        except (Exception, SystemExit) as error:
            # Before the warning, which may be raised as an error.
            self._drafter = None
            message = (
                f"{self._owner.failure(error, f'drafter {self._name!r}').rstrip('.')}. It is "
                "dropped: from now on nothing is drafted."
            )
            warnings.warn(message, PluginWarning, stacklevel=2)
            if self.config.parallel.tensor_parallel_size > 1:
                # Other ranks may wait in a collective of the drafter: the step fails on all ranks.
                if isinstance(error, Exception):
                    raise
                raise PluginError(message) from error


def _make_read_only(inputs: StepInputs) -> None:
    """Makes the step's arrays read-only. They are views of one step; the next one makes new
    ones."""
    parts: list[StepInputs | GroupInputs] = [inputs, *inputs.groups]
    for part in parts:
        for field in dataclasses.fields(part):
            if isinstance(array := getattr(part, field.name), np.ndarray):
                array.flags.writeable = False
