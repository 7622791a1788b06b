"""The half that works in the sampler: it rules out the tokens that the grammar does not allow."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

from toolkit_lm_llguidance.vocabulary import Source, Vocabulary, limits

_COMPILED = 64
"""Grammars that are kept: sequences of one request have the same, and so have many requests."""


class _Sequence:
    """Where one sequence stands in its grammar."""

    def __init__(self, vocabulary: Vocabulary, compiled: Future[LLMatcher]) -> None:
        self.vocabulary = vocabulary
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_read = 0

    def matcher(self, row: ProcessorRow) -> LLMatcher:
        """After the output so far. Raises ValueError where that does not follow the grammar."""
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        new = row.token_ids[row.num_prompt_tokens + self._num_read :].tolist()
        self._num_read += len(new)
        for token in new:
            # A request may ignore the end: the same last token comes again and again.
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
        return _checked(self._matcher)


class StructuredOutput(LogitsProcessor):
    """A sequence's place in its grammar follows from its tokens: nothing else has to survive a preemption."""

    stage = "logits"

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._sequences: dict[int, _Sequence] = {}
        self._compiled: OrderedDict[tuple[Source, str], Future[LLMatcher]] = OrderedDict()
        self._compiler = ThreadPoolExecutor(1, "llguidance")
        """Compiles while the sequence's prompt is computed."""
        self._executor = LLExecutor()

    def add(self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]) -> None:
        source = Source(arguments["tokenizer"], tuple(arguments["eos_token_ids"]))
        vocabulary, key = Vocabulary.of(source), (source, arguments["grammar"])
        if key not in self._compiled:
            self._compiled[key] = self._compiler.submit(_compile, vocabulary, arguments["grammar"])
        self._compiled.move_to_end(key)
        while len(self._compiled) > _COMPILED:
            self._compiled.popitem(last=False)
        self._sequences[row.key] = _Sequence(vocabulary, self._compiled[key])

    def remove(self, key: int) -> None:
        self._sequences.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        sequences = [self._sequences[row.key] for row in rows]
        matchers = [sequence.matcher(row) for sequence, row in zip(sequences, rows, strict=True)]
        masks = allocate_token_bitmask(len(rows), max(sequence.vocabulary.size for sequence in sequences))
        if len(rows) == 1:
            matchers[0].unsafe_compute_mask_ptr(masks.ctypes.data, masks.nbytes)
        else:
            fill_next_token_bitmask_par(self._executor, list(zip(matchers, range(len(rows)), strict=True)), masks)
        for matcher in matchers:
            _checked(matcher)
        bits = np.unpackbits(masks.view(np.uint8), axis=-1, count=values.shape[-1], bitorder="little")
        forbidden = bits == 0
        if values.device.type == "cpu":
            # In one thread: starting more takes longer than the work.
            np.copyto(values.numpy(), -np.inf, where=forbidden)
        else:
            values.masked_fill_(torch.from_numpy(forbidden).to(values.device, non_blocking=True), -torch.inf)
        for index, (sequence, matcher) in enumerate(zip(sequences, matchers, strict=True)):
            if matcher.is_stopped():
                self._end(values[index], sequence.vocabulary.source.eos_token_ids)
        return values

    @staticmethod
    def _end(values: Tensor, eos_token_ids: Sequence[int]) -> None:
        """The grammar is at its end, and so is the sequence, whatever rules out its last token: there is no other."""
        if not (values > -torch.inf).any():
            values[eos_token_ids[0]] = 0.0


def _compile(vocabulary: Vocabulary, grammar: str) -> LLMatcher:
    return _checked(LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits()))


def _checked(matcher: LLMatcher) -> LLMatcher:
    if matcher.is_error():
        raise ValueError(matcher.get_error().removesuffix("<non-verbose/>").strip())
    return matcher
