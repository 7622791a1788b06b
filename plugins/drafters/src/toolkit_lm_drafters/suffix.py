"""The drafter "suffix": suffix decoding."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from msgspec import msgpack
from toolkit_lm.config import parse_memory
from toolkit_lm.messages import DraftRequest, NewSequence, StepResult
from toolkit_lm.step import StepInputs, StepRun
from torch import Tensor

from toolkit_lm_drafters.corpus import Corpus, Guess, Limits
from toolkit_lm_drafters.shared_outputs import SharedOutputs
from toolkit_lm_drafters.step_table import Tabled

_SIZES = (2, 6)
"""Tokens of the grams of a sequence's own tokens."""
_NUM_DRAFTS = 16


class _Sequence:
    """A sequence of the batch."""

    def __init__(self, seq: NewSequence) -> None:
        raw = seq.inputs.parts.get("drafter")
        self.scope = "" if raw is None else msgpack.decode(raw, type=DraftRequest).scope
        self.num_prompt_tokens = seq.num_prompt_tokens
        self.output = list(seq.token_ids[seq.num_prompt_tokens :])
        self.corpus = Corpus(_SIZES, len(seq.token_ids) + 64)
        self.probabilities: list[float] = []


class SuffixDrafter(Tabled):
    """Finds the longest match of a sequence's last tokens, in the sequence itself and in the
    outputs of finished requests of the same scope, and drafts what followed most often.

    The longer the match, the more it drafts. A scope is a tenant's: requests of one cache_salt and
    one adapter. Finished outputs are added in a thread of their own, beside the steps.
    """

    def __init__(self, *arguments: Any, **own: Any) -> None:
        super().__init__(*arguments, **own)
        options = self.options
        self._limits = Limits(
            options.num_speculative_tokens or _NUM_DRAFTS,
            options.suffix_decoding_max_tree_depth,
            options.suffix_decoding_max_spec_factor,
            options.suffix_decoding_min_token_prob,
        )
        self.shared = SharedOutputs(int(parse_memory(options.suffix_memory)))
        self._sequences: dict[int, _Sequence] = {}
        self._thread = ThreadPoolExecutor(1, "suffix-drafter")
        self._added: Future[None] | None = None
        """The last addition to the shared outputs."""

    def add(self, seq: NewSequence) -> None:
        self._sequences[seq.seq_id] = _Sequence(seq)

    def remove(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is None or not self.shared.most_bytes:
            return
        if self._added is not None and self._added.done():
            self._added.result()
        output = np.array(sequence.output, np.int32)
        self._added = self._thread.submit(self.shared.add, sequence.scope, output)

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        histories = inputs.histories
        for place, most in zip(inputs.sampling, inputs.max_drafts, strict=True):
            if most and result.token_ids[place]:
                seq_id = inputs.plan.scheduled[place].seq_id
                sequence = self._sequences[seq_id]
                tokens = histories.tokens(inputs.rows[place])
                # No step asks for drafts while they do not pay.
                known = sequence.num_prompt_tokens + len(sequence.output)
                sequence.output += tokens[known:].tolist()
                sequence.corpus.update(tokens)
                limits = self._limits._replace(num_tokens=min(self._limits.num_tokens, most))
                guess = self._guess(sequence, tokens, len(tokens), limits)
                sequence.probabilities = guess.probabilities
                if guess.tokens:
                    result.drafts[seq_id] = guess.tokens

    def _guess(
        self, sequence: _Sequence, tokens: np.ndarray, num_known: int, limits: Limits
    ) -> Guess:
        known = tokens.data
        own = sequence.corpus.guess(known, num_known, known, limits)
        others = self.shared.guess(sequence.scope, known, limits)
        return max(own, others, key=lambda guess: guess.score)

    def propose(self, token_ids: np.ndarray) -> list[int]:
        corpus = Corpus(_SIZES, len(token_ids))
        corpus.update(token_ids)
        known = token_ids.data
        return corpus.guess(known, len(known), known, self._limits).tokens

    def extend(self, seq_id: int, token_ids: np.ndarray, num_drafts: int) -> list[int]:
        sequence = self._sequences[seq_id]
        limits = self._limits._replace(num_tokens=self._limits.num_tokens - num_drafts)
        if limits.num_tokens <= 0:
            return []
        guess = self._guess(sequence, token_ids, len(token_ids) - num_drafts, limits)
        sequence.probabilities = guess.probabilities
        return guess.tokens

    def acceptance(self, seq_id: int, drafts: Sequence[int]) -> Sequence[float]:
        return self._sequences[seq_id].probabilities

    def wait(self) -> None:
        """Waits until all finished outputs are added."""
        self._thread.submit(bool).result()

    def close(self) -> None:
        self._thread.shutdown()
