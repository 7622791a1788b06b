"""The half that works in the sampler: it rules out the tokens that the grammar does not allow."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
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


class _Position:
    """Place of a sequence in its grammar, after some of its tokens.

    If the next text is known, so are its tokens: the ones the tokenizer makes of it. The matcher
    has consumed them already."""

    def __init__(self, matcher: Matcher, forced: Sequence[int] = ()) -> None:
        """`forced`: tokens that must follow, and that the matcher has consumed."""
        self.matcher = matcher
        self.forced = deque(forced)
        """Tokens that must follow."""
        self.mask: np.ndarray | None = None
        """[words] int32, as Matcher.fill makes it: what may follow them. None until it is
        computed."""
        if not self.forced:
            self._force()

    def after(self, token: int) -> _Position:
        """The place after one more token; this one stays as it is. Raises ValueError for a token
        that the grammar does not allow."""
        if self.forced:
            self._check(token)
            found = _Position.__new__(_Position)
            found.matcher = self.matcher
            found.forced = deque(islice(self.forced, 1, None))
            found.mask = self.mask
            return found
        if self.matcher.is_stopped:
            return self
        matcher = self.matcher.copy()
        matcher.consume(token)
        return _Position(matcher)

    def consume(self, token: int) -> None:
        """Goes on by a token in place. Raises ValueError as `after`."""
        if self.forced:
            self._check(token)
            self.forced.popleft()
        # A request may ignore the end: the same last token comes again and again.
        elif not self.matcher.is_stopped:
            self.matcher.consume(token)
            self._force()

    def allowed(self) -> np.ndarray | int:
        """The allowed next tokens: a mask, or the only token."""
        if self.forced:
            return self.forced[0]
        assert self.mask is not None, "it was made"
        return self.mask

    def _check(self, token: int) -> None:
        if self.forced[0] != token:
            raise ValueError("the output does not follow the grammar")

    def _force(self) -> None:
        self.mask = None
        if not self.matcher.is_stopped:
            for token in self.matcher.forced():
                self.matcher.consume(token)
                self.forced.append(token)


class _Sequence:
    """State of one sequence in its grammar: the place after its tokens, and those after its
    drafts."""

    def __init__(self, compiled: Future[_Grammar]) -> None:
        self._compiled = compiled
        self._position: _Position | None = None
        self._num_read = 0
        self._drafted: list[tuple[int, _Position]] = []
        """Drafts, and the place after each."""
        self.is_slow = False
        """It took long to read its last tokens."""
        self._spent = 0.0
        self._error: RequestError | None = None

    @property
    def compiler(self) -> GrammarCompiler:
        return self._compiled.result().compiler

    def read(self, row: ProcessorRow) -> _Position:
        """Goes on to the output so far. Returns the place after a row's tokens, drafts included.
        Raises RequestError where they do not follow the grammar, or take too much; from then on,
        unless a draft is to blame."""
        if self._error is not None:
            raise self._error
        num_tokens = len(row.token_ids) - row.num_drafts
        if self._position is None or num_tokens != row.num_prompt_tokens + self._num_read:
            new = row.token_ids[row.num_prompt_tokens + self._num_read : num_tokens].tolist()
            try:
                self._measured(self._advance, new)
            except ValueError as error:
                self._error = too_complex(str(error))
                raise self._error from None
        assert self._position is not None, "it was read"
        if not row.num_drafts:
            return self._position
        drafts = row.token_ids[num_tokens:].tolist()
        if self.num_allowed(drafts) < len(drafts):
            raise too_complex("a draft does not follow the grammar")
        return self._drafted[len(drafts) - 1][1]

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """Number of drafts, from the first, that may follow the tokens that were read."""
        same = 0
        for token, (known, _) in zip(drafts, self._drafted, strict=False):
            if token != known:
                break
            same += 1
        if same == len(drafts):
            return same
        del self._drafted[same:]
        # A token that the grammar does not allow, or takes too much for, is not drafted.
        with suppress(ValueError):
            self._measured(self._draft, drafts[same:])
        return len(self._drafted)

    def spend(self, seconds: float, num_tokens: int = 0) -> None:
        """Counts seconds of computing. `num_tokens`: the tokens read in that time, if any."""
        self._spent += seconds
        self.is_slow = seconds > _SLOW if num_tokens else self.is_slow

    def _measured(self, call: Callable[[Sequence[int]], None], tokens: Sequence[int]) -> None:
        begun = time.thread_time()
        num_read = self._num_read
        try:
            if self._spent > _SECONDS + _SECONDS_PER_TOKEN * self._num_read:
                raise ValueError(
                    f"following {self._num_read} tokens took {self._spent:.2g} s; is the grammar "
                    "ambiguous?"
                )
            call(tokens)
        finally:
            self.spend(time.thread_time() - begun, self._num_read - num_read)

    def _advance(self, tokens: Sequence[int]) -> None:
        """Goes on by tokens that were drawn."""
        if self._position is None:
            self._position = _Position(self._compiled.result().start.copy())
        self._num_read += len(tokens)
        for token in tokens:
            if self._drafted and self._drafted[0][0] == token:
                self._position = self._drafted.pop(0)[1]
            else:
                self._drafted.clear()
                self._position.consume(token)

    def _draft(self, drafts: Sequence[int]) -> None:
        """Adds places after more drafts."""
        position = self._drafted[-1][1] if self._drafted else self._position
        assert position is not None, "drafts follow what was read"
        for token in drafts:
            if position.matcher.is_stopped and not position.forced:
                # Nothing but the end follows.
                break
            position = position.after(token)
            self._drafted.append((token, position))


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
    verifies_drafts = True

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
        self._fill([(sequence, sequence.read(row)) for sequence, row in pairs])

    @staticmethod
    def _fill(places: Sequence[tuple[_Sequence, _Position]]) -> None:
        """Makes the masks that places lack."""
        lacking: dict[
            tuple[GrammarCompiler, _Sequence | None], list[tuple[_Sequence, _Position]]
        ] = {}
        for sequence, position in places:
            if position.mask is None:
                lacking.setdefault(
                    (sequence.compiler, sequence if sequence.is_slow else None), []
                ).append((sequence, position))
        for (compiler, alone), some in lacking.items():
            begun = time.thread_time()
            masks = np.zeros((len(some), -(-compiler.size // 32)), np.int32)
            try:
                compiler.fill([position.matcher for _, position in some], masks)
            except ValueError as error:
                raise too_complex(str(error)) from None
            finally:
                if alone is not None:
                    alone.spend(time.thread_time() - begun)
            for (_, position), mask in zip(some, masks, strict=True):
                position.mask = mask

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        self._join()
        sequences = [self._sequences[row.key] for row in rows]
        places = [sequence.read(row) for sequence, row in zip(sequences, rows, strict=True)]
        pairs = list(zip(sequences, places, strict=True))
        self._fill([pair for pair in pairs if not pair[1].forced])
        # Nothing fails from here on.
        apply_masks(values, [place.allowed() for place in places])
        for index, (sequence, place) in enumerate(pairs):
            if not place.forced and place.matcher.is_stopped:
                self._end(values[index], sequence.compiler.source.eos_token_ids)
        return values

    def drafts(self, row: ProcessorRow) -> list[int]:
        self._join()
        # A token that does not follow the grammar was drawn in vain.
        with suppress(ValueError):
            return list(self._sequences[row.key].read(row).forced)[:_MOST_FORCED]
        return []

    def num_allowed(self, row: ProcessorRow, drafts: Sequence[int]) -> int:
        self._join()
        sequence = self._sequences[row.key]
        with suppress(ValueError):
            sequence.read(row)
            return sequence.num_allowed(drafts)
        return 0

    @staticmethod
    def _end(values: Tensor, eos_token_ids: Sequence[int]) -> None:
        """Allows an end token if the grammar has ended but everything is ruled out: the sequence
        has no other way to go on."""
        if not (values > -torch.inf).any():
            values[eos_token_ids[0]] = 0.0
