"""Tokens and sampling parameters of many sequences on the host, one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from toolkit_lm.messages import NewSequence, SequenceInputs
from toolkit_lm.param_spec import spec_of
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.sampling.bad_words import BadWords, ForbiddenTextRules
from toolkit_lm.sampling.processor import ProcessorRow
from toolkit_lm.sampling.processors import ProcessorTable

_NUMBERS = [
    name for name, o in SAMPLING_PARAMS.items() if o.kinds == (float,) and spec_of(o).use == "draws"
]
"""Parameters that are columns of float32 as they are."""


MIN_TEMPERATURE = 1e-5
"""Below this a temperature divides float32 logits into infinities, and the draw is the likeliest
token anyway."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class TokenRules:
    """The parameters of a request that speak of single tokens. Its sequences share them."""

    given: tuple[SamplingParams, SequenceInputs, list[int]]
    """What they were made of."""
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
        bias = params.logit_bias or {}
        return cls(
            (params, inputs, stop_token_ids),
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

    def are_of(self, inputs: SequenceInputs, stop_token_ids: list[int]) -> bool:
        """Another sequence with the same parameters has these rules, too."""
        _, known, stop = self.given
        same = (
            known.bad_words == inputs.bad_words and known.forbidden_texts == inputs.forbidden_texts
        )
        return same and stop == stop_token_ids


_NO_RULES = TokenRules((SamplingParams(), SequenceInputs(), []), np.zeros(0, np.int64))


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
        """The tokens of a row from position `start` on. The last `num_drafts` of them do not count
        yet."""
        end = start + len(token_ids)
        self.token_ids[row, start:end] = token_ids
        self.num_tokens[row] = max(self.num_tokens[row], end - num_drafts)

    def append(self, rows: np.ndarray, token_ids: list[int]) -> None:
        """One token for each of `rows` [R]. What a full row gets is counted, but no step will ever
        read it."""
        # Few operations, since most of what each takes is the way to its code: the model has had
        # the caches since the last step.
        ends = self.num_tokens[rows]
        try:
            self.token_ids[rows, ends] = token_ids
        except IndexError:
            inside = ends < self.token_ids.shape[1]
            self.token_ids[rows[inside], ends[inside]] = np.array(token_ids)[inside]
        ends += 1
        self.num_tokens[rows] = ends

    def tokens(self, row: int) -> np.ndarray:
        """All tokens of a row: a view, [its number of tokens] int32."""
        return self.token_ids[row, : self.num_tokens[row]]

    def output(self, row: int) -> np.ndarray:
        """The output tokens of a row: a view."""
        return self.token_ids[row, self.num_prompt_tokens[row] : self.num_tokens[row]]

    def padded(self, rows: np.ndarray, *, output_only: bool = False, fill: int) -> np.ndarray:
        """[R, longest] int64, left-aligned: all tokens of `rows`, or their output; `fill`
        elsewhere."""
        ends = self.num_tokens[rows][:, None]
        starts = self.num_prompt_tokens[rows][:, None] if output_only else 0
        positions = np.arange(int(ends.max()))
        return np.where(
            (positions >= starts) & (positions < ends), self.token_ids[rows, : len(positions)], fill
        ).astype(np.int64)


class SamplingBatch:
    """Columns over rows: what `sample` needs of each sequence.

    A row is set when a sequence joins the batch, and cleared when it leaves; each step selects its
    rows.
    """

    temperature: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    repetition_penalty: np.ndarray
    presence_penalty: np.ndarray
    frequency_penalty: np.ndarray

    def __init__(self, history: TokenHistory, processors: ProcessorTable | None = None) -> None:
        """`processors`: where rows register that ask for plugins' logits processors; None: such a
        request is not expected."""
        num_rows = len(history.num_tokens)
        self.history = history
        self.processors = processors
        self.row = np.arange(num_rows)
        """Each row's place in the history."""
        for name in _NUMBERS:
            setattr(self, name, np.zeros(num_rows, np.float32))
        self.top_k = np.zeros(num_rows, np.int64)
        """0: all."""
        self.seed = np.zeros(num_rows, np.uint64)
        self.key = np.zeros(num_rows, np.int64)
        """The sequence's id, for its life."""
        self.position = np.zeros(num_rows, np.int64)
        """Output tokens drawn so far: the counter of the random numbers."""
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.logprobs = np.full(num_rows, -1, np.int64)
        """Alternatives wanted; -1: no logprobs at all."""
        self.logprob_token_ids = np.full(num_rows, None, object)
        """Alternatives that the request names; None: the likeliest ones."""
        self.prompt_logprobs = np.full(num_rows, -1, np.int64)
        self.num_candidates = np.zeros(num_rows, np.int64)
        """Likeliest tokens that a beam search wants; 0: a token is drawn."""
        self.filtered = np.zeros(num_rows, bool)
        """Some filter beside the temperature is on."""
        self.edited = np.zeros(num_rows, bool)
        """Logits are not used as they are: there are rules beside the stop tokens, penalties, or
        plugins' processors of them."""
        self.unusual: set[int] = set()
        """Rows that do not just take the likeliest token of the model's logits. Where there are
        none, logits need not be made."""
        self.read_prompts: set[int] = set()
        """Rows that want log probabilities of their prompts."""
        self.follows = np.zeros(num_rows, bool)
        """What must follow the tokens needs no draw: nothing but one processor has a say in it, and
        nobody asks how likely it was."""
        self.forces = np.zeros(num_rows, bool)
        """Some places of the output have a token that must be drawn there."""
        self.forced = np.full(num_rows, None, object)
        """These tokens, by place."""
        self.rules = np.full(num_rows, _NO_RULES, object)
        self._known = WeakValueDictionary[int, TokenRules]()
        """Those in use, by the identity of the parameters."""
        self.work = [np.empty((3, num_rows), np.uint64)]
        """Memory for `uniform`. In a list, since it is no column."""
        self._selected: list[dict[str, np.ndarray]] = []
        """Columns that `select` fills: here first, of a selection in a selection next."""
        self._depth = 0

    def set(self, row: int, seq: NewSequence) -> None:
        """Takes in a sequence; its tokens are in the history already."""
        params = seq.params
        for name in _NUMBERS:
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
        stages = (
            self.processors.add(self.processor_row(row), seq)
            if self.processors is not None and seq.inputs.logits_processors
            else ()
        )
        rules = self._known.get(id(params))
        given = (params, seq.inputs, seq.stop_token_ids)
        if rules is None or not rules.are_of(seq.inputs, seq.stop_token_ids):
            rules = self._known[id(params)] = TokenRules.of(*given)
        self.rules[row] = rules
        penalized = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        ruled = any(
            one is not None
            for one in (rules.allowed, rules.bias, rules.bad_words, rules.forbidden_texts)
        )
        self.edited[row] = penalized or ruled or "logits" in stages
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
        (self.unusual.discard if is_usual else self.unusual.add)(row)
        (self.read_prompts.discard if params.prompt_logprobs is None else self.read_prompts.add)(
            row
        )
        self.follows[row] = len(seq.inputs.logits_processors) == 1 and not (
            ruled or self.forces[row] or self.logprobs[row] >= 0
        )

    def clear(self, row: int) -> None:
        """The sequence leaves."""
        if self.processors is not None and self.key[row] in self.processors.names:
            self.processors.remove(int(self.key[row]))
        self.rules[row] = _NO_RULES
        self.unusual.discard(row)
        self.read_prompts.discard(row)
        self.num_candidates[row] = 0
        self.prompt_logprobs[row] = -1

    def select(self, rows: np.ndarray) -> SamplingBatch:
        """The given rows [R], until the next call."""
        if len(self._selected) == self._depth:
            columns = [
                (name, column)
                for name, column in vars(self).items()
                if isinstance(column, np.ndarray)
            ]
            self._selected.append(
                {
                    name: np.zeros(len(self.history.num_tokens), column.dtype)
                    for name, column in columns
                }
            )
        selected = object.__new__(SamplingBatch)
        vars(selected).update(vars(self), _depth=self._depth + 1)
        for name, out in self._selected[self._depth].items():
            setattr(
                selected,
                name,
                np.take(getattr(self, name), rows, out=out[: len(rows)], mode="clip"),
            )
        return selected

    def must_draw(self) -> dict[int, int]:
        """By row, the token that must be drawn now, where there is one."""
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
        tokens = self.history.tokens(place)
        tokens.flags.writeable = False
        return ProcessorRow(
            int(self.key[row]),
            tokens,
            int(self.history.num_prompt_tokens[place]),
            int(self.seed[row]),
        )

    def users(self, rows: np.ndarray) -> tuple[list[int], Callable[[int], ProcessorRow]]:
        """The keys of `rows` [R], and what gives one by its index: for logits processors."""
        return self.key[rows].tolist(), lambda index: self.processor_row(rows[index])

    def __len__(self) -> int:
        return len(self.seed)
