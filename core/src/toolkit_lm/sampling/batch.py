"""Tokens and sampling parameters of many sequences on the host, one row each."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from toolkit_lm.messages import NewSequence, SequenceInputs
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling.bad_words import BadWords, ForbiddenTextRules
from toolkit_lm.sampling.processor import ProcessorRow, Stage
from toolkit_lm.sampling.processors import ProcessorTable

MIN_TEMPERATURE = 1e-5
"""Below this a temperature divides float32 logits into infinities, and the draw is the likeliest
token anyway."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class TokenRules:
    """Rules of a request about single tokens, as arrays. Its sequences share them."""

    params: SamplingParams
    inputs: SequenceInputs
    stop_token_ids: list[int]
    """With `params` and `inputs`: the source of the rules."""
    stop: np.ndarray
    allowed: np.ndarray | None = None
    bias_ids: np.ndarray | None = None
    bias: np.ndarray | None = None
    bad_words: BadWords | None = None
    forbidden_texts: ForbiddenTextRules | None = None

    @classmethod
    def of(
        cls, params: SamplingParams, inputs: SequenceInputs, stop_token_ids: list[int]
    ) -> TokenRules:
        """Builds the rules of one request."""
        bias = params.logit_bias or {}
        return cls(
            params,
            inputs,
            stop_token_ids,
            stop=np.array(stop_token_ids, np.int64),
            allowed=None
            if params.allowed_token_ids is None
            else np.array(params.allowed_token_ids, np.int64),
            bias_ids=np.array(list(bias), np.int64) if bias else None,
            bias=np.array(list(bias.values()), np.float32) if bias else None,
            bad_words=BadWords(inputs.bad_words) if inputs.bad_words else None,
            forbidden_texts=None
            if inputs.forbidden_texts is None
            else ForbiddenTextRules(inputs.forbidden_texts),
        )

    def serve(self, inputs: SequenceInputs, stop_token_ids: list[int]) -> bool:
        """Whether another sequence with the same parameters has the same rules."""
        return (
            self.inputs.bad_words == inputs.bad_words
            and self.inputs.forbidden_texts == inputs.forbidden_texts
            and self.stop_token_ids == stop_token_ids
        )

    @property
    def restrict(self) -> bool:
        """Whether there are rules beside the stop tokens."""
        rules = (self.allowed, self.bias, self.bad_words, self.forbidden_texts)
        return any(rule is not None for rule in rules)


_NO_RULES = TokenRules(SamplingParams(), SequenceInputs(), [], np.zeros(0, np.int64))


class TokenHistory:
    """Prompt and output tokens of each row; rows have a fixed capacity."""

    def __init__(self, num_rows: int, max_len: int) -> None:
        self.token_ids = np.zeros((num_rows, max_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, np.int64)

    def set(self, row: int, token_ids: list[int], num_prompt_tokens: int) -> None:
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = num_prompt_tokens

    def put(self, row: int, start: int, token_ids: list[int], num_drafts: int = 0) -> None:
        """Stores tokens of a row from position `start` on. The last `num_drafts` are drafts, which
        do not count yet."""
        end = start + len(token_ids)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = max(self.num_tokens[row], end - num_drafts)

    def append(
        self, rows: np.ndarray, token_ids: list[int], num_drafts: np.ndarray | int = 0
    ) -> None:
        """Appends one token to each of `rows` [R], after its first `num_drafts` drafts. A token
        beyond the capacity is counted, but no step reads it."""
        # Few NumPy calls: the CPU's caches are cold after the model, so the calls themselves take
        # most of the time.
        ends = self.num_tokens[rows] + num_drafts
        try:
            self.token_ids[rows, ends] = token_ids
        except IndexError:
            inside = ends < self.token_ids.shape[1]
            self.token_ids[rows[inside], ends[inside]] = np.array(token_ids)[inside]
        ends += 1
        self.num_tokens[rows] = ends

    def tokens(self, row: int, num_drafts: int = 0) -> np.ndarray:
        """All tokens of a row, and its first `num_drafts` drafts: a view, [number of tokens]
        int32."""
        return self.token_ids[row, : self.num_tokens[row] + num_drafts]

    def output(self, row: int, num_drafts: int = 0) -> np.ndarray:
        """The output tokens of a row, and its first `num_drafts` drafts: a view."""
        return self.tokens(row, num_drafts)[self.num_prompt_tokens[row] :]

    def padded(self, rows: np.ndarray, *, output_only: bool = False, fill: int) -> np.ndarray:
        """All tokens of `rows`, or their output: [R, longest] int64, left-aligned, padded with
        `fill`."""
        ends = self.num_tokens[rows][:, None]
        starts = self.num_prompt_tokens[rows][:, None] if output_only else 0
        positions = np.arange(int(ends.max()))
        return np.where(
            (positions >= starts) & (positions < ends), self.token_ids[rows, : len(positions)], fill
        ).astype(np.int64)

    def drafts(self, rows: np.ndarray, num_drafts: np.ndarray, *, fill: int) -> np.ndarray:
        """The first `num_drafts` [R] drafts of `rows`: [R, most] int64, padded with `fill`."""
        within = np.arange(int(num_drafts.max()))
        places = np.minimum(self.num_tokens[rows][:, None] + within, self.token_ids.shape[1] - 1)
        is_draft = within < num_drafts[:, None]
        return np.where(is_draft, self.token_ids[rows[:, None], places], fill).astype(np.int64)


class Column(NamedTuple):
    """Declares an array of a SamplingBatch with one entry per row."""

    dtype: Any
    default: Any = 0
    """Value of a row that no sequence has."""

    def array(self, num_rows: int) -> np.ndarray:
        return np.full(num_rows, self.default, self.dtype)


def _column(dtype: Any, default: Any = 0) -> Any:
    """A Column, typed as the array that an instance has in its place."""
    return Column(dtype, default)


class SamplingBatch:
    """Sampling state of sequences, in columns with one entry per row: what `sample` reads.

    A row is set when a sequence joins the batch, and cleared when it leaves. Each step selects the
    rows that it draws for.
    """

    temperature: np.ndarray = _column(np.float32)
    top_p: np.ndarray = _column(np.float32)
    min_p: np.ndarray = _column(np.float32)
    repetition_penalty: np.ndarray = _column(np.float32)
    presence_penalty: np.ndarray = _column(np.float32)
    frequency_penalty: np.ndarray = _column(np.float32)
    top_k: np.ndarray = _column(np.int64)
    """0: all tokens."""
    min_tokens: np.ndarray = _column(np.int64)
    row: np.ndarray = _column(np.int64)
    """Index of the row in the history."""
    num_drafts: np.ndarray = _column(np.int64)
    """Number of drafts after the row's tokens that are taken as drawn: the row is one of several
    positions of its sequence."""
    seed: np.ndarray = _column(np.uint64)
    key: np.ndarray = _column(np.int64, -1)
    """Id of the sequence, which it keeps for its life."""
    position: np.ndarray = _column(np.int64)
    """Number of output tokens drawn so far: the counter of the random numbers."""
    logprobs: np.ndarray = _column(np.int64, -1)
    """Number of alternatives whose log probabilities are returned. -1: no log probabilities."""
    logprob_token_ids: np.ndarray = _column(object, None)
    """Token ids whose log probabilities the request names. None: those of the likeliest tokens."""
    prompt_logprobs: np.ndarray = _column(np.int64, -1)
    """Number of alternatives at each token of the prompt. -1: no log probabilities."""
    num_candidates: np.ndarray = _column(np.int64)
    """Number of likeliest tokens that a beam search asks for. 0: a token is drawn."""
    filtered: np.ndarray = _column(bool)
    """Whether top-k, top-p or min-p is on."""
    edited: np.ndarray = _column(bool)
    """Whether logits are changed before the draw: by rules beside the stop tokens, by penalties, or
    by logits processors of the stage "logits"."""
    follows: np.ndarray = _column(bool)
    """Whether tokens that a logits processor forces can be appended without a draw: it is the only
    processor, there are no other rules, and no log probabilities are returned."""
    forces: np.ndarray = _column(bool)
    """Whether `forced` names tokens."""
    forced: np.ndarray = _column(object, None)
    """Tokens that must be drawn, by position in the output."""
    rules: np.ndarray = _column(object, _NO_RULES)
    """TokenRules of each row."""
    steps: np.ndarray = _column(bool)
    """Whether drafts of the row are verified one after the other: a logits processor keeps state
    that changes with each draw."""

    logprobs_mode = "raw_logprobs"
    """The option of this name, of all rows."""

    def __init__(self, history: TokenHistory, processors: ProcessorTable | None = None) -> None:
        """`processors` is the table of plugins' logits processors. None: no request may name
        one."""
        num_rows = len(history.num_tokens)
        self.history = history
        self.processors = processors
        for name, column in COLUMNS.items():
            setattr(self, name, column.array(num_rows))
        self.row[:] = np.arange(num_rows)
        self.unusual: set[int] = set()
        """Rows that do more than take the likeliest token of the model's logits. Where there are
        none, logits need not be computed."""
        self.read_prompts: set[int] = set()
        """Rows that return log probabilities of their prompts."""
        self.work = np.empty((3, num_rows), np.uint64)
        """Scratch memory of `uniform`."""
        self._known_rules = WeakValueDictionary[int, TokenRules]()
        """Rules in use, by the identity of the parameters."""
        self._selection: tuple[SamplingBatch, list[tuple[str, np.ndarray]]] | None = None
        """The batch that `select` returns, and the memory of its columns."""

    def set(self, row: int, seq: NewSequence) -> None:
        """Fills a row for a sequence whose tokens are in the history already."""
        params = seq.params
        for name in PARAMETERS:
            getattr(self, name)[row] = getattr(params, name)
        self.top_k[row] = max(params.top_k, 0)
        self.seed[row] = seq.seed
        self.key[row] = seq.seq_id
        self.position[row] = len(seq.token_ids) - seq.num_prompt_tokens
        self.min_tokens[row] = params.min_tokens
        # The best of several are chosen by the log probabilities of their tokens.
        num_logprobs = 0 if params.ranks else -1
        if params.num_logprobs is not None:
            num_logprobs = params.num_logprobs
        self.logprobs[row] = num_logprobs
        self.logprob_token_ids[row] = params.logprob_token_ids
        self.num_candidates[row] = seq.num_candidates
        self.prompt_logprobs[row] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.forces[row] = bool(seq.inputs.forced_tokens)
        self.forced[row] = seq.inputs.forced_tokens
        self.filtered[row] = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        stages: set[Stage] = set()
        if self.processors is not None and seq.inputs.logits_processors:
            stages = self.processors.add(self.processor_row(row), seq)
            self.steps[row] = self.processors.steps(seq.seq_id)
        rules = self._rules_of(seq)
        self.rules[row] = rules
        penalized = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        self.edited[row] = penalized or rules.restrict or "logits" in stages
        as_is = not (
            self.edited[row]
            or self.forces[row]
            or params.min_tokens
            or seq.inputs.logits_processors
        )
        is_usual = (
            as_is
            and params.temperature < MIN_TEMPERATURE
            and self.logprobs[row] < 0
            and not seq.num_candidates
        )
        _put_in(self.unusual, row, not is_usual)
        _put_in(self.read_prompts, row, params.prompt_logprobs is not None)
        self.follows[row] = len(seq.inputs.logits_processors) == 1 and not (
            rules.restrict or self.forces[row] or self.logprobs[row] >= 0
        )

    def _rules_of(self, seq: NewSequence) -> TokenRules:
        """Rules of a sequence: those of another one of its request where they are the same."""
        rules = self._known_rules.get(id(seq.params))
        if rules is None or not rules.serve(seq.inputs, seq.stop_token_ids):
            rules = TokenRules.of(seq.params, seq.inputs, seq.stop_token_ids)
            self._known_rules[id(seq.params)] = rules
        return rules

    def clear(self, row: int) -> None:
        """Gives a row its defaults again: its sequence has left."""
        if self.processors is not None and self.key[row] in self.processors.names:
            self.processors.remove(int(self.key[row]))
        for name, column in COLUMNS.items():
            getattr(self, name)[row] = column.default
        self.row[row] = row
        self.unusual.discard(row)
        self.read_prompts.discard(row)

    def select(self, rows: np.ndarray, num_drafts: np.ndarray | None = None) -> SamplingBatch:
        """Copies the columns of `rows` [R], in their order: a batch of R rows.

        `num_drafts` [R]: drafts that are taken as drawn; the same row may come with several
        numbers. It is overwritten by the next `select` of this batch. History and processors are
        shared.
        """
        size = len(rows)
        if self._selection is None or size > self._selection[0].work.shape[1]:
            self._selection = None
            capacity = max(size, len(self.history.num_tokens))
            selection = copy(self)
            selection.work = np.empty((3, capacity), np.uint64)
            memory = [(name, column.array(capacity)) for name, column in COLUMNS.items()]
            self._selection = selection, memory
        selection, memory = self._selection
        # Whoever had it before may have taken its processors away.
        selection.processors = self.processors
        for name, column in memory:
            taken = getattr(self, name).take(rows, out=column[:size], mode="clip")
            setattr(selection, name, taken)
        if num_drafts is not None:
            selection.num_drafts += num_drafts
            selection.position += num_drafts
        return selection

    def must_draw(self) -> dict[int, int]:
        """Tokens that must be drawn now, by row. Rows that may draw any token are left out."""
        rows = np.flatnonzero(self.forces).tolist()
        positions = self.position.tolist()
        return {
            row: self.forced[row][positions[row]]
            for row in rows
            if positions[row] in self.forced[row]
        }

    def processor_row(self, row: int) -> ProcessorRow:
        """A row as logits processors see it."""
        place = int(self.row[row])
        num_drafts = int(self.num_drafts[row])
        tokens = self.history.tokens(place, num_drafts)
        tokens.flags.writeable = False
        return ProcessorRow(
            int(self.key[row]),
            tokens,
            int(self.history.num_prompt_tokens[place]),
            int(self.seed[row]),
            num_drafts,
        )

    def output(self, row: int) -> np.ndarray:
        """The output tokens of a row, and its drafts that are taken as drawn: a view."""
        return self.history.output(self.row[row], self.num_drafts[row])

    def users(self, rows: np.ndarray) -> tuple[list[int], Callable[[int], ProcessorRow]]:
        """The keys of `rows` [R], and what gives one by its index: for logits processors."""
        return self.key[rows].tolist(), lambda index: self.processor_row(rows[index])

    def __len__(self) -> int:
        return len(self.seed)


def _put_in(members: set[int], row: int, is_member: bool) -> None:
    if is_member:
        members.add(row)
    else:
        members.discard(row)


COLUMNS = {name: column for name, column in vars(SamplingBatch).items() if type(column) is Column}
"""Every column of a SamplingBatch, by name."""
PARAMETERS = [name for name, column in COLUMNS.items() if column.dtype is np.float32]
"""Columns that hold a sampling parameter of the same name as it is."""
