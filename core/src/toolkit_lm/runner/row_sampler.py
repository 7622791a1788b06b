"""The row sampler: samples the tokens of a step's rows from its hidden states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from toolkit_lm.attention import logits_of_tokens
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.model import Model
from toolkit_lm.runner.batch import PersistentBatch
from toolkit_lm.runner.prompt_logprobs import prompt_logprobs
from toolkit_lm.sampling import Sampled, SamplingBatch, greedy_sample, sample, top_candidates
from toolkit_lm.sampling.transfer import to_device
from toolkit_lm.step import StepInputs


class Positions(NamedTuple):
    """Positions of a step that tokens are drawn at: S sampling rows, each after its tokens and
    after each of its drafts."""

    rows: np.ndarray
    """[S] rows in the persistent batch."""
    num_drafts: np.ndarray
    """[S] number of drafts to verify."""
    logits: np.ndarray
    """[N] flat tokens whose hidden states give the logits: those of a row in a run."""
    first: np.ndarray
    """[S] start of each row's run in `logits`."""

    def lengths(self, sampling: SamplingBatch) -> np.ndarray:
        """Returns [S] the number of positions of each row that the first draw samples at."""
        return np.where(sampling.steps[self.rows], 1, self.num_drafts + 1)

    def select(self, sampling: SamplingBatch) -> SamplingBatch:
        """Selects these positions."""
        return _select(sampling, self.rows, self.lengths(sampling))


class RowSampler:
    """Samples tokens for rows whose last token was computed, and appends them to the persistent
    batch. Rows of a beam search get candidates.

    Tokens are those without drafts: each position is sampled as if its drafts had been, and a row
    keeps its samples up to the first that differs from its draft.
    """

    def __init__(self, model: Model, batch: PersistentBatch) -> None:
        self._model = model
        self._batch = batch
        self._certain: dict[int, list[int]] = {}
        """Forced tokens that follow the last sampled ones, by seq_id."""
        self._positions: Positions | None = None
        """Positions of the running step; None: it has no drafts."""
        self._accepted: dict[int, list[int]] = {}
        """Drafts of the running step that no draw can reject, by index in the plan."""

    # A step calls these in turn

    def begin(self, inputs: StepInputs) -> None:
        """Prepares a step's draws before its forward pass, in steps with drafts or logits
        processors, which may work meanwhile."""
        self._positions = self._find_positions(inputs) if inputs.num_drafts.any() else None
        sampling = self._batch.sampling
        if sampling.processors is not None and sampling.processors.names:
            rows = inputs.rows[inputs.sampling]
            selected = sampling
            if self._positions is not None:
                selected = self._positions.select(sampling)
                rows = np.arange(len(selected))
            sampling.processors.begin(*selected.users(rows))

    def _find_positions(self, inputs: StepInputs) -> Positions:
        self._accepted = {}
        rows = inputs.rows[inputs.sampling]
        num_drafts = inputs.num_drafts - (self._accept_forced(inputs) if self._certain else 0)
        counts = num_drafts + 1
        ends = counts.cumsum()
        first = ends - counts
        if ends[-1] == len(inputs.token_index):
            # Each token is one, in most steps.
            within = np.arange(ends[-1])
        else:
            within = _runs(inputs.query_start[1:][inputs.sampling] - counts, counts)
        return Positions(rows, num_drafts, within, first)

    def sample(self, inputs: StepInputs, hidden_states: Tensor) -> StepResult:
        """Computes logits, and tokens or candidates, for the rows whose last token was computed."""
        plan = inputs.plan
        sampling = self._batch.sampling
        result = StepResult(token_ids=[[] for _ in plan.scheduled])
        if sampling.read_prompts:
            result.prompt_logprobs = prompt_logprobs(
                inputs, self._batch, hidden_states, self._model.compute_logits
            )
        if not len(inputs.sampling):
            return result
        # In a decode step each row has one token, and samples one.
        is_decode = len(inputs.sampling) == len(hidden_states)
        if inputs.num_drafts.any() or sampling.num_candidates.any():
            self._sample_drafted(inputs, hidden_states, result)
            return result
        rows = inputs.rows if is_decode else inputs.rows[inputs.sampling]
        last = hidden_states
        if not is_decode:
            last = _rows(hidden_states, inputs.query_start[1:][inputs.sampling] - 1)
        if sampling.unusual:
            logits = self._model.compute_logits(last)
            sampled = sample(logits, sampling.select(rows), self._model.kernels.likeliest)
        else:
            # Logits need not be computed.
            sampled = greedy_sample(*self._model.likeliest(last))
        self._batch.append_tokens(rows, sampled.token_ids)
        for place, token in zip(inputs.sampling, sampled.token_ids, strict=True):
            result.token_ids[place].append(token)
        if sampled.logprobs or sampled.errors or sampled.states:
            self._store_others(plan, result, sampled, inputs.sampling)
        return result

    def _sample_drafted(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult
    ) -> None:
        """Samples for a step in which some rows have drafts or are beams."""
        plan = inputs.plan
        sampling = self._batch.sampling
        # Without drafts, `begin` may not have been called.
        positions = self._positions if inputs.num_drafts.any() else None
        positions = positions or self._find_positions(inputs)
        for place, drafts in self._accepted.items():
            result.token_ids[place] = list(drafts)
        rows, num_drafts, within, first = positions
        last = _rows(hidden_states, within)
        with logits_of_tokens(to_device(within, last.device)):
            if not sampling.unusual:
                # Logits need not be computed.
                sampled = greedy_sample(*self._model.likeliest(last))
                self._store(plan, result, sampled, inputs.sampling, rows, num_drafts + 1)
                return
            logits = self._model.compute_logits(last)
        candidates = sampling.num_candidates[rows]
        if len(searching := np.flatnonzero(candidates)):
            found = top_candidates(
                _rows(logits, first[searching]), sampling.select(rows[searching])
            )
            seq_ids = [plan.scheduled[place].seq_id for place in inputs.sampling[searching]]
            result.candidates = {seq_ids[i]: beams for i, beams in found.candidates.items()}
            result.errors |= {seq_ids[i]: error for i, error in found.errors.items()}
        going = np.flatnonzero(candidates == 0)
        # One call for all positions, but for the drafts of rows that step.
        lengths = positions.lengths(sampling)
        left = num_drafts + 1 - lengths
        while len(going):
            agrees = self._draw(
                plan,
                result,
                _rows(logits, _runs(first[going], lengths[going])),
                inputs.sampling[going],
                rows[going],
                lengths[going],
                left[going],
            )
            going = going[agrees]
            first = first + 1
            left -= 1

    def drafts(self, inputs: StepInputs, result: StepResult) -> None:
        """Adds the forced tokens to a step's drafts, and cuts drafts that cannot be drawn."""
        sampling = self._batch.sampling
        processors = sampling.processors
        self._certain = {}
        if processors is not None and processors.names and len(inputs.sampling):
            users = sampling.users(inputs.rows[inputs.sampling])
            self._certain = processors.drafts(*users)
            result.drafts |= self._certain
            processors.cut(result.drafts, *users)
            result.forced = [*self._certain]

    # Parts of a draw

    def _draw(
        self,
        plan: StepPlan,
        result: StepResult,
        logits: Tensor,
        places: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        left: np.ndarray,
    ) -> np.ndarray:
        """Samples at `lengths` [R] positions of each row. Returns [R] whether a row goes on: it has
        `left` [R] drafts, and its sample equals the first of them."""
        sampling = self._batch.sampling
        selected = _select(sampling, rows, lengths)
        sampled = sample(logits, selected, self._model.kernels.likeliest)
        going = left > 0
        if going.any():
            history = self._batch.history
            drafts = history.token_ids[rows[going], history.num_tokens[rows[going]]]
            going[going] = drafts == np.array(sampled.token_ids)[lengths.cumsum() - 1][going]
            for index in sampled.errors:
                going[np.searchsorted(lengths.cumsum(), index, "right")] = False
        self._store(plan, result, sampled, places, rows, lengths)
        return going

    def _store(
        self,
        plan: StepPlan,
        result: StepResult,
        sampled: Sampled,
        places: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Stores the samples of each row up to the first that differs from its draft. `places`:
        indices in the plan; `rows`: rows in the persistent batch; `lengths`: positions of each."""
        token_ids = sampled.token_ids
        ends = lengths.cumsum()
        several = len(token_ids) > len(rows)
        last = self._last_valid(sampled, rows, lengths) if several else ends - 1
        accepted = last - ends + lengths
        start = (ends - lengths).tolist()
        end = (last + 1).tolist()
        self._batch.append_tokens(rows, [token_ids[i - 1] for i in end], accepted)
        for place, begin, stop in zip(places.tolist(), start, end, strict=True):
            result.token_ids[place] += token_ids[begin:stop]
        if not (sampled.logprobs or sampled.errors or sampled.states):
            return
        kept = [i for begin, stop in zip(start, end, strict=True) for i in range(begin, stop)]
        # Errors and states are those of first positions: see `_last_valid`.
        first = {begin: i for i, begin in enumerate(start)}
        logprobs = [sampled.logprobs[i] for i in kept] if sampled.logprobs else []
        sampled = Sampled(
            token_ids,
            logprobs,
            {first[i]: error for i, error in sampled.errors.items() if i in first},
            {first[i]: state for i, state in sampled.states.items()},
        )
        self._store_others(plan, result, sampled, places, accepted + 1)

    @staticmethod
    def _store_others(
        plan: StepPlan,
        result: StepResult,
        sampled: Sampled,
        places: np.ndarray,
        lengths: np.ndarray | None = None,
    ) -> None:
        """Stores log probabilities, of `lengths` [R] samples of each row or of one, and errors and
        states of rows."""
        if sampled.logprobs:
            result.logprobs = result.logprobs or [[] for _ in plan.scheduled]
            of_sample = places if lengths is None else np.repeat(places, lengths)
            for place, entry in zip(of_sample, sampled.logprobs, strict=True):
                result.logprobs[place] += [] if entry is None else [entry]
        for i, error in sampled.errors.items():
            result.errors[plan.scheduled[places[i]].seq_id] = error
        for i, state in sampled.states.items():
            result.sampler_state[plan.scheduled[places[i]].seq_id] = state

    def _last_valid(self, sampled: Sampled, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Returns [R] the index of each row's last sample whose drafts are all sampled, too."""
        history = self._batch.history
        # An error counts only where it is a row's first position. Elsewhere the row ends before it,
        # and the next step meets it again.
        errors = sampled.errors
        found: list[int] = []
        start = 0
        for row, length in zip(rows, lengths.tolist(), strict=True):
            end = history.num_tokens[row]
            last = start
            for draft in history.token_ids[row, end : end + length - 1].tolist():
                if draft != sampled.token_ids[last] or last in errors or last + 1 in errors:
                    break
                last += 1
            found.append(last)
            start += length
        return np.array(found)

    def _accept_forced(self, inputs: StepInputs) -> np.ndarray:
        """Returns [S] the number of drafts per row that are accepted without sampling, since no
        other token is possible."""
        sampling = self._batch.sampling
        taken = np.zeros_like(inputs.num_drafts)
        for index in inputs.num_drafts.nonzero()[0]:
            place = inputs.sampling[index]
            scheduled = inputs.plan.scheduled[place]
            row = inputs.rows[place]
            drafts = scheduled.tokens[-scheduled.num_drafts :]
            if (
                sampling.follows[row]
                and self._certain.get(scheduled.seq_id, [])[: len(drafts)] == drafts
            ):
                taken[index] = len(drafts)
                self._accepted[int(place)] = drafts
                # They are in the history already, and now they count.
                inputs.histories.num_tokens[row] += len(drafts)
                sampling.position[row] += len(drafts)
        return taken


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates ranges: `lengths` [R] integers from each of `starts` [R] on."""
    ends = lengths.cumsum()
    found: np.ndarray = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    return found


def _select(sampling: SamplingBatch, rows: np.ndarray, lengths: np.ndarray) -> SamplingBatch:
    """Selects `lengths` [R] positions of each row: after its tokens, and after each draft."""
    if len(rows) == lengths.sum():
        return sampling.select(rows)
    return sampling.select(np.repeat(rows, lengths), _runs(np.zeros(len(rows), np.int64), lengths))


def _rows(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Selects rows of a tensor, given in rising order without duplicates. If they are all rows,
    returns the tensor itself. The host does not wait."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[to_device(rows, tensor.device)]
