"""Drafting as a part of a step. A drafter's errors can neither change a token nor end a request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from msgspec import Raw, msgpack
from torch import Tensor, nn

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import PluginError
from toolkit_lm.messages import NewSequence, StepPlan, StepResult
from toolkit_lm.parts.draft_chain import DraftChain, check_tokens
from toolkit_lm.plugin import Plugins, PluginWarning
from toolkit_lm.step import Drafter, GroupInputs, StepInputs, StepPart, StepRun, StepTime

_MOST = 2**31
"""Drafts of a sequence that has no limit."""
_ARRAYS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    kind: attrgetter(*kind.__slots__) for kind in (StepInputs, GroupInputs)
}
"""Reads all that a step's inputs hold, by class."""


class DraftingPart(StepPart):
    """Asks drafters for drafts. A drafter that fails is dropped with one warning: tokens are the
    same without it.

    Of several drafters, each row of a step takes the drafts that are expected to gain most. The
    others may extend them.
    """

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
        """Makes the drafters that the config names. Raises PluginError if that fails."""
        super().__init__(model, config, device, plugins=plugins, options=options)
        self._vocab_size = config.vocab_size or np.inf
        self._drafters: dict[str, Drafter] = {
            name: self._make(name) for name in config.scheduler.drafter or ()
        }
        self._names = list(self._drafters)
        made = self._drafters.values()
        self._following = [each for each in made if type(each).follow is not Drafter.follow]
        self.taps = list(dict.fromkeys(tap for drafter in made for tap in drafter.taps))
        self.lookahead = max((drafter.lookahead for drafter in made), default=0)
        self.buffers = self._merged("buffer", lambda drafter: drafter.buffers)
        self._chain = DraftChain(self._vocab_size)
        self.step_times: list[StepTime] = []
        """Steps that the warm-up has measured."""

    def _make(self, name: str) -> Drafter:
        owner = self.plugins.drafters.get(name).owner
        drafter: Drafter = self.plugins.drafters.make(
            name,
            self.model,
            self.config,
            self.device,
            plugins=self.plugins,
            options=self.plugins.options(owner.name),
        )
        for method in ("groups", "inputs"):
            if getattr(type(drafter), method) is not getattr(StepPart, method):
                raise PluginError(
                    f"{owner}: drafter {name!r} defines {method}(): a drafter has no say in the "
                    "model's forward pass."
                )
        return drafter

    def _merged(self, noun: str, ask: Callable[[Drafter], Mapping[str, Any]]) -> dict[str, Any]:
        """Merges what drafters state by name. Raises PluginError for a name of two drafters."""
        merged: dict[str, Any] = {}
        for name, drafter in self._drafters.items():
            stated = ask(drafter)
            for key in merged.keys() & stated.keys():
                raise PluginError(f"drafter {name!r} has a {noun} {key!r}, and another has it too.")
            merged |= stated
        return merged

    def load(self, weights: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        for drafter in self._drafters.values():
            drafter.load(weights)

    def layers(self) -> Mapping[str, CacheLayer]:
        return self._merged("layer", lambda drafter: drafter.layers())

    def facts(self) -> Raw:
        rests = all(drafter.rests for drafter in self._drafters.values())
        return Raw(msgpack.encode((self.step_times, rests)))

    def ask_first(self, call: Callable[[Drafter], Any]) -> Any:
        """Calls the first drafter. None: it has failed."""
        return self._guarded(self._names[0], call)

    def reserved_bytes(self) -> int:
        return sum(drafter.reserved_bytes() for drafter in self._drafters.values())

    def context(self, inputs: StepInputs, buffers: Mapping[str, np.ndarray]) -> None:
        self._each(
            lambda drafter: drafter.context(
                inputs, {name: buffers[name] for name in drafter.buffers}
            )
        )

    def begin(self, plan: StepPlan, step: StepRun) -> None:
        if plan.after_failure:
            self._agree()
        is_decode = plan.num_tokens == len(plan.scheduled) and not plan.new
        self.reads_taps = plan.asks_drafters or any(
            drafter.follows_decodes or not is_decode for drafter in self._following
        )

    def example(self, plan: StepPlan) -> None:
        self._agree()

    def _agree(self) -> None:
        """Drops the drafters that another rank has dropped. Otherwise they would wait for that
        rank."""
        group = tensor_parallel_group(self.config.parallel)
        if group.size > 1:
            dropped = [float(name not in self._drafters) for name in self._names]
            everywhere = group.all_reduce(torch.tensor(dropped, device=self.device)).tolist()
            for name, is_dropped in zip(self._names, everywhere, strict=True):
                if is_dropped:
                    self._drafters.pop(name, None)

    def add(self, seq: NewSequence) -> None:
        self._each(lambda drafter: drafter.add(seq))

    def remove(self, seq_id: int) -> None:
        self._chain.remove(seq_id)
        self._each(lambda drafter: drafter.remove(seq_id))

    def close(self) -> None:
        self._each(lambda drafter: drafter.close())

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """Adds drafts to a step's result. Drafters get copies, and arrays that they cannot write
        to."""
        if not self._drafters:
            return
        self._chain.observe(inputs.plan, result)
        if not self.reads_taps:
            return
        limits = inputs.plan.max_drafts
        inputs.max_drafts = np.array(
            [limits.get(row.seq_id, _MOST) for row in inputs.plan.scheduled if row.samples],
            np.int64,
        )
        history = inputs.histories.token_ids
        history.setflags(write=False)
        try:
            _make_read_only(inputs)
            if inputs.plan.asks_drafters:
                drafts = self._drafts(inputs, hidden_states, result, step)
            else:
                drafts = {}
                self._each(lambda drafter: drafter.follow(inputs, hidden_states, step))
        finally:
            history.setflags(write=True)
        for seq_id, tokens in drafts.items():
            if kept := tokens[: limits.get(seq_id, _MOST)]:
                result.drafts[seq_id] = kept

    def _drafts(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> dict[int, list[int]]:
        proposals: dict[str, dict[int, list[int]]] = {}

        def ask(drafter: Drafter) -> dict[int, list[int]]:
            own = StepResult(token_ids=[list(drawn) for drawn in result.token_ids])
            drafter.finish(inputs, hidden_states, own, step)
            self._check(drafter, inputs.plan, result, own.drafts)
            return own.drafts

        for name in [*self._drafters]:
            if (drafts := self._guarded(name, ask)) is not None:
                proposals[name] = drafts
        if len(self._names) == 1:
            drafts = proposals.get(self._names[0], {})
            self._chain.keep(self._names[0], drafts)
            return drafts
        return self._chain.choose(inputs, proposals, self._guarded)

    def _check(
        self, drafter: Drafter, plan: StepPlan, result: StepResult, drafts: dict[int, list[int]]
    ) -> None:
        """Raises ValueError unless `drafts` are lists of the model's tokens, for sequences that
        have sampled one."""
        drawing = {
            row.seq_id for row, drawn in zip(plan.scheduled, result.token_ids, strict=True) if drawn
        }
        for seq_id, tokens in drafts.items():
            check_tokens(drafter, tokens, self._vocab_size)
            if seq_id not in drawing:
                raise ValueError(
                    f"{type(drafter).__qualname__} has proposed {tokens!r}: no list of token ids "
                    "of a sequence that drew one"
                )

    def _each(self, call: Callable[[Drafter], object]) -> None:
        for name in [*self._drafters]:
            self._guarded(name, call)

    def _guarded(self, name: str, call: Callable[[Drafter], Any]) -> Any:
        """Calls a drafter. Drops it if it raises, and returns None."""
        if (drafter := self._drafters.get(name)) is None:
            return None
        try:
            return call(drafter)
        except (Exception, SystemExit) as error:
            # Before the warning, which may be raised as an error.
            del self._drafters[name]
            owner = self.plugins.drafters.get(name).owner
            left = (
                f"{', '.join(self._drafters)} goes on" if self._drafters else "nothing is drafted"
            )
            message = (
                f"{owner.failure(error, f'drafter {name!r}').rstrip('.')}. It is dropped: from now "
                f"on {left}."
            )
            warnings.warn(message, PluginWarning, stacklevel=2)
            if self.config.parallel.tensor_parallel_size > 1:
                # Other ranks may wait in a collective of the drafter: the step fails on all ranks.
                if isinstance(error, Exception):
                    raise
                raise PluginError(message) from error
            return None


def _make_read_only(inputs: StepInputs) -> None:
    """Makes the step's arrays read-only. They are views of one step; the next one makes new
    ones."""
    for part in (inputs, *inputs.groups):
        for array in _ARRAYS[type(part)](part):
            if type(array) is np.ndarray:
                array.setflags(write=False)
