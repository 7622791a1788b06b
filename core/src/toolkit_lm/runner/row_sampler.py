"""The row sampler: samples the tokens of a step's rows from its hidden states."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from toolkit_lm.attention import logits_of_tokens
from toolkit_lm.messages import ScheduledSequence, StepPlan, StepResult
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
        """Prepares a step's draws before its forward pass, in steps with logits processors, which
        may work meanwhile."""
        self._positions = None
        selected = self._batch.sampling
        rows = inputs.rows[inputs.sampling]
        if inputs.num_drafts.any():
            self._positions = self._find_positions(inputs)
            selected = self._positions.select(selected)
            rows = np.arange(len(selected))
        if selected.processors is not None:
            selected.processors.begin(*selected.users(rows))

    def _find_positions(self, inputs: StepInputs) -> Positions:
        self._accepted = {}
        rows = inputs.rows[inputs.sampling]
        num_drafts = inputs.num_drafts - (self._accept_forced(inputs) if self._certain else 0)
        size = len(rows) + int(num_drafts.sum())
        within = np.arange(size)
        # Each token is one, in most steps.
        if size < len(inputs.token_index):
            counts = num_drafts + 1
            within = _runs(inputs.query_start[1:][inputs.sampling] - counts, counts)
        return Positions(rows, num_drafts, within)

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
        # Without processors, `begin` was not called.
        begun = sampling.processors is not None and sampling.processors.names
        positions = (self._positions if begun else None) or self._find_positions(inputs)
        for place, drafts in self._accepted.items():
            result.token_ids[place] = list(drafts)
        rows, num_drafts, within = positions
        last = _rows(hidden_states, within)
        with logits_of_tokens(to_device(within, last.device)):
            if not sampling.unusual:
                # Logits need not be computed.
                sampled = greedy_sample(*self._model.likeliest(last))
                self._store(plan, result, sampled, inputs.sampling, rows, num_drafts + 1)
                return
            logits = self._model.compute_logits(last)
        lengths = num_drafts + 1
        if not (sampling.num_candidates.any() or sampling.steps.any()):
            self._draw(plan, result, logits, inputs.sampling, rows, lengths)
            return
        candidates = sampling.num_candidates[rows]
        first = lengths.cumsum() - lengths
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
        while len(going):
            runs = _rows(logits, _runs(first[going], lengths[going]))
            places = inputs.sampling[going]
            self._draw(plan, result, runs, places, rows[going], lengths[going])
            goes_on = [
                sampling.steps[row] and _agrees(plan.scheduled[place], result, place)
                for place, row in zip(places, rows[going], strict=True)
            ]
            going = going[goes_on]
            first = first + 1

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
    ) -> None:
        """Samples at `lengths` [R] positions of each row."""
        selected = _select(self._batch.sampling, rows, lengths)
        sampled = sample(logits, selected, self._model.kernels.likeliest)
        self._store(plan, result, sampled, places, rows, lengths)

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
        token_ids, logprobs, errors, states = sampled
        spans: list[tuple[int, int]] = []
        begin = 0
        for place, length in zip(places.tolist(), lengths.tolist(), strict=True):
            last = begin
            # An error counts only where it is a row's first position. Elsewhere the row ends before
            # it, and the next step meets it again.
            for draft in plan.scheduled[place].tokens[1 - length :] if length > 1 else ():
                if draft != token_ids[last] or last in errors or last + 1 in errors:
                    break
                last += 1
            spans.append((begin, last + 1))
            result.token_ids[place] += token_ids[begin : last + 1]
            begin += length
        counts = np.array([end - begin for begin, end in spans])
        self._batch.append_tokens(rows, [token_ids[end - 1] for _, end in spans], counts - 1)
        if not (logprobs or errors or states):
            return
        kept = [logprobs[i] for span in spans for i in range(*span)] if logprobs else []
        first = {begin: i for i, (begin, _) in enumerate(spans)}
        sampled = Sampled(
            token_ids,
            kept,
            {first[i]: error for i, error in errors.items() if i in first},
            {first[i]: state for i, state in states.items()},
        )
        self._store_others(plan, result, sampled, places, counts)

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


def _agrees(row: ScheduledSequence, result: StepResult, place: int) -> bool:
    """Whether all samples of a row so far are its drafts, and more are left."""
    drawn = result.token_ids[place]
    drafts = row.tokens[len(row.tokens) - row.num_drafts :]
    return (
        len(drawn) <= len(drafts)
        and drawn == drafts[: len(drawn)]
        and row.seq_id not in result.errors
    )


def _runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenates ranges: `lengths` [R] integers from each of `starts` [R] on."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + lengths[0])
    ends = lengths.cumsum()
    found: np.ndarray = np.arange(ends[-1]) + (starts - ends + lengths).repeat(lengths)
    return found


def _select(sampling: SamplingBatch, rows: np.ndarray, lengths: np.ndarray) -> SamplingBatch:
    """Selects `lengths` [R] positions of each row: after its tokens, and after each draft."""
    if len(rows) == lengths.sum():
        return sampling.select(rows)
    return sampling.select(rows.repeat(lengths), _runs(lengths - lengths, lengths))


def _rows(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Selects rows of a tensor, given in rising order without duplicates. If they are all rows,
    returns the tensor itself. The host does not wait."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[to_device(rows, tensor.device)]
