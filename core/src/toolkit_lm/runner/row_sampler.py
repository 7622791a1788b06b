"""The row sampler: samples the tokens of a step's rows from its hidden states."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from toolkit_lm.attention import logits_of_tokens
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.model import Model
from toolkit_lm.runner.batch import PersistentBatch
from toolkit_lm.runner.prompt_logprobs import prompt_logprobs
from toolkit_lm.sampling import Sampled, greedy_sample, sample, top_candidates
from toolkit_lm.sampling.transfer import to_device
from toolkit_lm.step import StepInputs


class RowSampler:
    """Samples tokens for rows whose last token was computed, and appends them to the persistent
    batch. Rows of a beam search get candidates."""

    def __init__(self, model: Model, batch: PersistentBatch) -> None:
        self.certain: dict[int, list[int]] = {}
        """Forced tokens that follow the last sampled ones, by seq_id."""
        self._model = model
        self._batch = batch

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
        rows = inputs.rows if is_decode else inputs.rows[inputs.sampling]
        if not (sampling.unusual or (not is_decode and inputs.num_drafts.any())):
            last = hidden_states
            if not is_decode:
                last = _rows(hidden_states, inputs.query_start[1:][inputs.sampling] - 1)
            self._store(
                plan, result, greedy_sample(*self._model.likeliest(last)), inputs.sampling, rows
            )
            return result
        if is_decode and not sampling.num_candidates.any():
            self._draw(
                plan, result, self._model.compute_logits(hidden_states), inputs.sampling, rows
            )
            return result
        self._sample_drafted(inputs, hidden_states, result, rows)
        return result

    def _sample_drafted(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, rows: np.ndarray
    ) -> None:
        """Samples for a step in which some rows have drafts or are beams."""
        plan = inputs.plan
        sampling = self._batch.sampling
        # Logits per row: those after its last token, preceded by those that its drafts are compared
        # with.
        num_drafts = inputs.num_drafts - self._accept_forced(inputs, result)
        counts = num_drafts + 1
        firsts = counts.cumsum() - counts
        within = np.arange(firsts[-1] + counts[-1]) + np.repeat(
            inputs.query_start[1:][inputs.sampling] - counts - firsts, counts
        )
        with logits_of_tokens(to_device(within, hidden_states.device)):
            logits = self._model.compute_logits(_rows(hidden_states, within))
        candidates = sampling.num_candidates[rows]
        if len(searching := np.flatnonzero(candidates)):
            # Candidates for beams.
            found = top_candidates(
                _rows(logits, firsts[searching]),
                sampling.select(rows[searching]),
            )
            seq_ids = [plan.scheduled[place].seq_id for place in inputs.sampling[searching]]
            result.candidates = {
                seq_ids[i]: candidates for i, candidates in found.candidates.items()
            }
            result.errors |= {seq_ids[i]: error for i, error in found.errors.items()}
        going = np.flatnonzero(candidates == 0)
        while len(going):
            # The result is as if each token were sampled in its own step: a row continues while the
            # draft equals the sampled token.
            part = _rows(logits, firsts[going])
            self._draw(plan, result, part, inputs.sampling[going], rows[going])
            firsts += 1
            drafted = going[num_drafts[going] > 0]
            going = np.array(
                [i for i in drafted if self._agrees(plan, result, inputs.sampling[i])], np.int64
            )

    @staticmethod
    def _agrees(plan: StepPlan, result: StepResult, place: int) -> bool:
        """Whether a row's last sampled token equals the draft at its position, so that the logits
        after it are valid."""
        scheduled = plan.scheduled[place]
        drawn = result.token_ids[place]
        return (
            scheduled.tokens[-scheduled.num_drafts :][: len(drawn)] == drawn
            and scheduled.seq_id not in result.errors
        )

    def _draw(
        self,
        plan: StepPlan,
        result: StepResult,
        logits: Tensor,
        places: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Samples tokens of rows. `places`: their indices in the plan; `rows`: their rows in the
        persistent batch."""
        sampled = sample(logits, self._batch.sampling.select(rows), self._model.kernels.likeliest)
        self._store(plan, result, sampled, places, rows)

    def _store(
        self,
        plan: StepPlan,
        result: StepResult,
        sampled: Sampled,
        places: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """Stores sampled tokens. `places`: indices in the plan; `rows`: rows in the persistent
        batch."""
        self._batch.append_tokens(rows, sampled.token_ids)
        for index, token in zip(places, sampled.token_ids, strict=True):
            result.token_ids[index].append(token)
        if sampled.logprobs:
            result.logprobs = result.logprobs or [[] for _ in plan.scheduled]
            for index, logprobs in zip(places, sampled.logprobs, strict=True):
                result.logprobs[index] += [] if logprobs is None else [logprobs]
        for i, error in sampled.errors.items():
            result.errors[plan.scheduled[places[i]].seq_id] = error
        for i, state in sampled.states.items():
            result.sampler_state[plan.scheduled[places[i]].seq_id] = state

    def _accept_forced(self, inputs: StepInputs, result: StepResult) -> np.ndarray:
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
                and self.certain.get(scheduled.seq_id, [])[: len(drafts)] == drafts
            ):
                taken[index] = len(drafts)
                result.token_ids[place] = drafts
                # They are in the history already, and now they count.
                inputs.histories.num_tokens[row] += len(drafts)
                sampling.position[row] += len(drafts)
        return taken


def _rows(tensor: Tensor, rows: np.ndarray) -> Tensor:
    """Selects rows of a tensor, given in rising order without duplicates. If they are all rows,
    returns the tensor itself. The host does not wait."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[to_device(rows, tensor.device)]
