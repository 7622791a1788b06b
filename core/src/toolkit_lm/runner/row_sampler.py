"""The row sampler: from the hidden states of a step to the tokens of its rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.model import Model, logits_of_tokens
from toolkit_lm.runner.batch import PersistentBatch
from toolkit_lm.runner.prompt_logprobs import prompt_logprobs
from toolkit_lm.sampling import Sampled, sample, take_likeliest, top_candidates
from toolkit_lm.sampling.transfer import to_device
from toolkit_lm.step import StepInputs


class RowSampler:
    """Draws the tokens of rows whose last token was computed, and appends them to the persistent
    batch. Rows of a beam search get candidates."""

    def __init__(self, model: Model, batch: PersistentBatch) -> None:
        self.certain: dict[int, list[int]] = {}
        """By seq_id, the tokens that must follow those that the last step has drawn."""
        self._model = model
        self._batch = batch

    def sample(self, inputs: StepInputs, hidden_states: Tensor) -> StepResult:
        """Logits, and tokens or candidates, of the rows whose last token was computed."""
        plan = inputs.plan
        sampling = self._batch.sampling
        result = StepResult(token_ids=[[] for _ in plan.scheduled])
        if sampling.read_prompts:
            result.prompt_logprobs = prompt_logprobs(
                inputs, self._batch, hidden_states, self._model.compute_logits
            )
        if not len(inputs.sampling):
            return result
        # In a decode step each row has one token, and draws one.
        is_decode = len(inputs.sampling) == len(hidden_states)
        rows = inputs.rows if is_decode else inputs.rows[inputs.sampling]
        if not (sampling.unusual or (not is_decode and inputs.num_drafts.any())):
            last = hidden_states
            if not is_decode:
                last = _rows(hidden_states, inputs.query_start[1:][inputs.sampling] - 1)
            self._take(
                plan, result, take_likeliest(*self._model.likeliest(last)), inputs.sampling, rows
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
        """Tokens of rows of which some have drafts, or candidates of rows that search."""
        plan = inputs.plan
        sampling = self._batch.sampling
        # The logits of a row: those after its last token, and before them those that its drafts are
        # compared with.
        num_drafts = inputs.num_drafts - self._take_certain(inputs, result)
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
            result.candidates = {seq_ids[i]: one for i, one in found.candidates.items()}
            result.errors |= {seq_ids[i]: error for i, error in found.errors.items()}
        going = np.flatnonzero(candidates == 0)
        while len(going):
            # As if each token were drawn in a step of its own: a row goes on while the draft is the
            # token that was drawn.
            part = _rows(logits, firsts[going])
            self._draw(plan, result, part, inputs.sampling[going], rows[going])
            firsts += 1
            drafted = going[num_drafts[going] > 0]
            going = np.array(
                [i for i in drafted if self._agrees(plan, result, inputs.sampling[i])], np.int64
            )

    @staticmethod
    def _agrees(plan: StepPlan, result: StepResult, place: int) -> bool:
        """Whether the last token that a row has drawn is the draft in its place, so that the logits
        after it count."""
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
        """Tokens of rows that draw. `places`: their indices in the plan; `rows`: those in the
        persistent batch."""
        sampled = sample(logits, self._batch.sampling.select(rows), self._model.kernels.likeliest)
        self._take(plan, result, sampled, places, rows)

    def _take(
        self,
        plan: StepPlan,
        result: StepResult,
        sampled: Sampled,
        places: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        """What was drawn for rows of the persistent batch, in these places of the plan."""
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

    def _take_certain(self, inputs: StepInputs, result: StepResult) -> np.ndarray:
        """[S] how many drafts of each row are drawn without a draw: there is but one token that it
        could give."""
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
    """These rows of a tensor, in rising order and each once: the tensor itself where they are all.
    The host does not wait for them."""
    if len(rows) == len(tensor):
        return tensor
    return tensor[to_device(rows, tensor.device)]
