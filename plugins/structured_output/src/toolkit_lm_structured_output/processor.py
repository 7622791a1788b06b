"""The half that works in the sampler: it rules out the tokens that the grammar does not allow."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.params import OF_THE_REQUEST
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

from toolkit_lm_structured_output.contract import GrammarCompiler, Matcher, Source, load_compiler
from toolkit_lm_structured_output.masking import apply_masks

_COMPILED = 64
"""Grammars that are kept: sequences of one request have the same, and so have many requests."""
_SECONDS = 0.5
_SECONDS_PER_TOKEN = 0.01
"""Computing time of one output: a fixed part, and a part for each of its tokens. An ambiguous
grammar takes longer with each token."""
_SLOW = 0.002
"""Seconds of computing per step above which a sequence is slow. Its mask is then made alone, and
the time counts."""
_MOST_FORCED = 64
"""Tokens that a step computes of what must follow."""


class _Grammar(NamedTuple):
    compiler: GrammarCompiler
    start: Matcher


class _Sequence:
    """State of one sequence in its grammar.

    If the next text is known, so are its tokens: the ones the tokenizer makes of it. The matcher
    has consumed them already."""

    def __init__(self, compiled: Future[_Grammar]) -> None:
        self.forced: deque[int] = deque()
        """Tokens that must follow."""
        self.mask: np.ndarray | None = None
        """[words] int32, as Matcher.fill makes it: what may follow them. None until it is
        computed."""
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._num_read = 0
        self.is_slow = False
        """It took long to read its last tokens."""
        self._spent = 0.0
        self._error: RequestError | None = None

    @property
    def compiler(self) -> GrammarCompiler:
        return self._compiled.result().compiler

    def allowed(self) -> np.ndarray | int:
        """The allowed next tokens: a mask, or the only token."""
        if self.forced:
            return self.forced[0]
        assert self.mask is not None, "it was made"
        return self.mask

    def read(self, row: ProcessorRow) -> Matcher:
        """Goes on to the output so far. Raises RequestError, from then on, where that does not
        follow the grammar, or takes too much."""
        if self._error is None:
            if (
                self._matcher is not None
                and len(row.token_ids) == row.num_prompt_tokens + self._num_read
            ):
                return self._matcher
            begun = time.thread_time()
            num_read = self._num_read
            try:
                return self._read(row)
            except ValueError as error:
                self._error = too_complex(str(error))
            finally:
                self.spend(time.thread_time() - begun, self._num_read - num_read)
        raise self._error

    def spend(self, seconds: float, num_tokens: int = 0) -> None:
        """Counts seconds of computing. `num_tokens`: the tokens read in that time, if any."""
        self._spent += seconds
        self.is_slow = seconds > _SLOW if num_tokens else self.is_slow

    def _read(self, row: ProcessorRow) -> Matcher:
        if self._spent > _SECONDS + _SECONDS_PER_TOKEN * self._num_read:
            raise ValueError(
                f"following {self._num_read} tokens took {self._spent:.2g} s; is the grammar "
                "ambiguous?"
            )
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._compiled.result().start.copy()
            self._force(matcher)
        new = row.token_ids[row.num_prompt_tokens + self._num_read :].tolist()
        self._num_read += len(new)
        for token in new:
            if self.forced:
                if self.forced.popleft() != token:
                    raise ValueError("the output does not follow the grammar")
            # A request may ignore the end: the same last token comes again and again.
            elif not matcher.is_stopped:
                matcher.consume(token)
                self._force(matcher)
        return matcher

    def _force(self, matcher: Matcher) -> None:
        self.mask = None
        if not matcher.is_stopped:
            for token in matcher.forced():
                matcher.consume(token)
                self.forced.append(token)


def too_complex(reason: str) -> RequestError:
    """The error of a request whose grammar cannot be followed any longer."""
    return RequestError(
        f"{OF_THE_REQUEST} ask for a structure that is too complex: {reason.rstrip('.')}"
    )


class StructuredOutput(LogitsProcessor):
    """A sequence's place in its grammar follows from its tokens: nothing else has to survive a
    preemption."""

    stage = "logits"
    atomic = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._sequences: dict[int, _Sequence] = {}
        self._compilers: dict[tuple[str, Source], GrammarCompiler] = {}
        self._compiled: OrderedDict[tuple[str, Source, str], Future[_Grammar]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "structured_output-compiler")
        """Compiles while the sequence's prompt is computed."""
        self._filler = ThreadPoolExecutor(1, "structured_output-masks")
        """Makes masks while the forward pass runs."""
        self._filling: Future[None] | None = None

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        source = Source(
            arguments["tokenizer"], tuple(arguments["eos_token_ids"]), arguments["vocab_size"]
        )
        key = (arguments["compiler"], source, arguments["grammar"])
        if key not in self._compiled:
            self._compiled[key] = self._thread.submit(self._compile, *key)
        self._compiled.move_to_end(key)
        while len(self._compiled) > _COMPILED:
            self._compiled.popitem(last=False)
        self._sequences[row.key] = _Sequence(self._compiled[key])

    def _compile(self, target: str, source: Source, grammar: str) -> _Grammar:
        compiler = self._compilers.get((target, source))
        if compiler is None:
            compiler = self._compilers[target, source] = load_compiler(target, source)
        return _Grammar(compiler, compiler.compile(grammar))

    def remove(self, key: int) -> None:
        self._join()
        self._sequences.pop(key, None)

    def begin(self, rows: Sequence[ProcessorRow]) -> None:
        self._join()
        pairs = [
            (self._sequences[row.key], row._replace(token_ids=row.token_ids.copy())) for row in rows
        ]
        self._filling = self._filler.submit(self._prepare, pairs)

    def _join(self) -> None:
        """Waits for the masks that are being made. What failed will fail again, for its own row."""
        if self._filling is not None:
            self._filling.exception()
            self._filling = None

    def _prepare(self, pairs: Sequence[tuple[_Sequence, ProcessorRow]]) -> None:
        """Reads the outputs so far, and makes the masks of what follows them, and what is
        forced."""
        lacking: dict[
            tuple[GrammarCompiler, _Sequence | None], list[tuple[_Sequence, Matcher]]
        ] = {}
        for sequence, row in pairs:
            matcher = sequence.read(row)
            if sequence.mask is None:
                lacking.setdefault(
                    (sequence.compiler, sequence if sequence.is_slow else None), []
                ).append((sequence, matcher))
        for (compiler, alone), some in lacking.items():
            begun = time.thread_time()
            masks = np.zeros((len(some), -(-compiler.size // 32)), np.int32)
            try:
                compiler.fill([matcher for _, matcher in some], masks)
            except ValueError as error:
                raise too_complex(str(error)) from None
            finally:
                if alone is not None:
                    alone.spend(time.thread_time() - begun)
            for (sequence, _), mask in zip(some, masks, strict=True):
                sequence.mask = mask

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        self._join()
        pairs = [(self._sequences[row.key], row) for row in rows]
        matchers = [sequence.read(row) for sequence, row in pairs]
        self._prepare([pair for pair in pairs if not pair[0].forced])
        # Nothing fails from here on.
        apply_masks(values, [sequence.allowed() for sequence, _ in pairs])
        for index, (sequence, _) in enumerate(pairs):
            if not sequence.forced and matchers[index].is_stopped:
                self._end(values[index], sequence.compiler.source.eos_token_ids)
        return values

    def drafts(self, row: ProcessorRow) -> list[int]:
        self._join()
        sequence = self._sequences[row.key]
        # A token that does not follow the grammar was drawn in vain.
        with suppress(ValueError):
            sequence.read(row)
        return list(sequence.forced)[:_MOST_FORCED]

    @staticmethod
    def _end(values: Tensor, eos_token_ids: Sequence[int]) -> None:
        """Allows an end token if the grammar has ended but everything is ruled out: the sequence
        has no other way to go on."""
        if not (values > -torch.inf).any():
            values[eos_token_ids[0]] = 0.0
