"""What a user may ask of the output: SamplingParams. It crosses process boundaries, so it is a msgspec struct."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable
from enum import Enum
from typing import Any, Literal

import msgspec
from msgspec import Struct

from toolkit_lm.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
"""Why a sequence ended: "abort" by its caller, "timeout" by its request's deadline, "error" with a message."""


class RequestOutputKind(Enum):
    """What a request's outputs hold, where they come one after another."""

    CUMULATIVE = 0
    """All that there is so far."""
    DELTA = 1
    """What has come since the last output."""
    FINAL_ONLY = 2
    """There is one output, at the end."""


MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_WORDS = 300
"""Most entries of bad_words, and of logit_bias."""
MAX_WORD_LENGTH = 256
MAX_ALLOWED_TOKENS = 2**18
MAX_LOGITS_PROCESSORS = 16
DRY_BREAKERS = ("\n", ":", '"', "*")
"""What ends a repetition where dry_sequence_breakers is not given."""

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "dry_multiplier": (0, 1000),
    "dry_base": (1, 100),
    "mirostat_eta": (0, 1),
    "length_penalty": (-10, 10),
}
_POSITIVE: dict[str, float] = {"top_p": 1, "typical_p": 1, "repetition_penalty": 1000, "mirostat_tau": 100}
"""Above 0, and at most this."""
_INTEGERS = (
    "n",
    "best_of",
    "beam_width",
    "top_k",
    "max_tokens",
    "min_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "dry_allowed_length",
    "truncate_prompt_tokens",
)
_OPTIONAL = ("best_of", "beam_width", "max_tokens", "seed", "logprobs", "prompt_logprobs", "mirostat_tau", "truncate_prompt_tokens")
_BEAM_ONLY = ("beam_width", "length_penalty", "early_stopping")
_WITH_BEAMS = frozenset(
    (
        *_BEAM_ONLY,
        "use_beam_search",
        "n",
        "best_of",
        "bad_words",
        "allowed_token_ids",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "max_tokens",
        "min_tokens",
        "truncate_prompt_tokens",
        "detokenize",
        "skip_special_tokens",
        "output_kind",
    )
)
"""The parameters that mean something in a beam search. The others say how a token is drawn, and none is."""


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when a sequence ends. Names and meanings are vLLM's.

    Raises RequestError (with `param` set) when a value is out of range.
    """

    n: int = 1
    """Sequences per prompt; the prompt is computed once."""
    best_of: int | None = None
    """Sequences that are computed, of which the n with the highest log probability per token are returned. None: n."""
    use_beam_search: bool = False
    """Search for the n likeliest sequences, as transformers' beam search does. Parameters that say how tokens are drawn are refused."""
    beam_width: int | None = None
    """Sequences that a beam search goes on with at each token; at least 2. None: best_of, or n."""
    length_penalty: float = 1.0
    """A beam search ranks by log probability / length ** length_penalty: above 0 favors long sequences, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """When a beam search that has beam_width ended sequences is over. True: at once. False: when the likeliest beam, had it ended now,
    would not be among them. "never": when no beam could come to be among them."""
    temperature: float = 1.0
    """0 is greedy. Logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p (Holtzman et al. 2019). In (0, 1]."""
    top_k: int = 0
    """Keep the top_k likeliest tokens. 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest (Nguyen et al. 2024). In [0, 1]."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is closest to the entropy, until their probability reaches typical_p (Meister et al. 2022)."""
    xtc_probability: float = 0.0
    """How often XTC ("exclude top choices") is applied to a draw. 0: never."""
    xtc_threshold: float = 0.1
    """XTC drops all tokens of at least this probability, but for the least likely of them."""
    mirostat_tau: float | None = None
    """Mirostat v2 (Basu et al. 2021): the surprise, in bits, that draws are steered to. None: off."""
    mirostat_eta: float = 0.1
    """Mirostat's learning rate."""
    repetition_penalty: float = 1.0
    """Tokens of the prompt and the output: positive logits are divided by it, negative ones multiplied (Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that is in the output. -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output. -2 to 2."""
    dry_multiplier: float = 0.0
    """DRY ("don't repeat yourself") subtracts dry_multiplier * dry_base ** (length - dry_allowed_length) from the logit of a token that
    would go on with a repetition of `length` tokens. 0: off."""
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    """Shorter repetitions are free."""
    dry_sequence_breakers: list[str | int] | None = None
    """Texts or token ids that a repetition does not reach across. None: newline, colon, quotation mark and asterisk."""
    bad_words: list[str] | None = None
    """Texts of which the last token is never drawn after the others."""
    logit_bias: dict[int, float] | None = None
    """Token id to what is added to its logit. -100 to 100."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be drawn."""
    logits_processors: dict[str, dict[str, Any]] | None = None
    """Processors that plugins bring: name to arguments."""
    seed: int | None = None
    """A seeded request draws the same random numbers whatever else is in the batch."""
    stop: str | list[str] | None = None
    """Texts that end a sequence. The output ends before the text, unless include_stop_str_in_output."""
    stop_token_ids: list[int] | None = None
    """Tokens that end a sequence, beside the checkpoint's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    max_tokens: int | None = 16
    """Most output tokens. None: as many as max_model_len leaves room for."""
    min_tokens: int = 0
    """Fewest output tokens: before that, no end-of-sequence or stop token can be drawn."""
    logprobs: int | None = None
    """Alternatives per output token whose log probability is returned, beside the token's own."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token whose log probability is returned, beside the token's own."""
    truncate_prompt_tokens: int | None = None
    """Read only so many tokens of a longer prompt: the last, which the output follows. -1: as many as leave room for max_tokens."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a streamed request holds."""

    def __post_init__(self) -> None:
        self._check_types()
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            _require(low <= value <= high, name, f"between {low} and {high:g}", value)
        for name, high in _POSITIVE.items():
            value = getattr(self, name)
            _require(value is None or 0 < value <= high, name, f"above 0 and at most {high:g}", value)
        _require(self.n >= 1, "n", "at least 1", self.n)
        _require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or more", self.top_k)
        _require(self.dry_allowed_length >= 1, "dry_allowed_length", "at least 1", self.dry_allowed_length)
        _require(self.seed is None or self.seed >= 0, "seed", "0 or more", self.seed)
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        most = self.max_tokens if self.max_tokens is not None else self.min_tokens
        _require(self.min_tokens <= most, "min_tokens", f"at most max_tokens ({most})", self.min_tokens)
        cut = self.truncate_prompt_tokens
        _require(cut is None or cut == -1 or cut >= 1, "truncate_prompt_tokens", "-1 or at least 1", cut)
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more", self.logprobs)
        _require(self.prompt_logprobs is None or self.prompt_logprobs >= 0, "prompt_logprobs", "0 or more", self.prompt_logprobs)
        self._check_stops()
        self._check_words()
        self._check_token_ids()
        self._check_processors()
        self._check_best_of()
        self._check_beams()

    def _check_types(self) -> None:
        for name in (*_RANGES, *_POSITIVE):
            value = getattr(self, name)
            number = (value is None and name in _OPTIONAL) or (_is_number(value) and _is_finite(value))
            _require(number, name, "a finite number", value)
        for name in _INTEGERS:
            value = getattr(self, name)
            integer = (value is None and name in _OPTIONAL) or (type(value) is int and abs(value) < 2**63)
            _require(integer, name, "an integer of at most 64 bits", value)
        for name in ("use_beam_search", "include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _require(type(getattr(self, name)) is bool, name, "true or false", getattr(self, name))
        _require(isinstance(self.output_kind, RequestOutputKind), "output_kind", "a RequestOutputKind", self.output_kind)

    def _check_stops(self) -> None:
        _require(isinstance(self.stop, str | list | tuple | None), "stop", "a text or a list of texts", self.stop)
        stops = self.stop_texts
        _require(len(stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} texts", len(stops))
        _require(all(isinstance(s, str) and s for s in stops), "stop", "a text or a list of texts, none of them empty", self.stop)
        _require(all(len(s) <= MAX_STOP_LENGTH for s in stops), "stop", f"texts of at most {MAX_STOP_LENGTH} characters", "a longer one")
        _require(not stops or self.detokenize, "stop", "unset where detokenize is off", self.stop)
        _require(isinstance(self.stop_token_ids, list | tuple | None), "stop_token_ids", "a list of token ids", self.stop_token_ids)
        ids = self.stop_token_ids or []
        _require(len(ids) <= MAX_STOPS, "stop_token_ids", f"at most {MAX_STOPS} ids", len(ids))
        _require(_are_token_ids(ids), "stop_token_ids", "a list of token ids", self.stop_token_ids)

    def _check_words(self) -> None:
        for name, kinds, kind in (("bad_words", str, "texts"), ("dry_sequence_breakers", str | int, "texts or token ids")):
            value = getattr(self, name)
            _require(isinstance(value, list | tuple | None), name, f"a list of {kind}", value)
            words = value or []
            _require(len(words) <= MAX_WORDS, name, f"at most {MAX_WORDS} {kind}", len(words))
            _require(all(isinstance(word, kinds) for word in words), name, f"a list of {kind}", value)
            texts = [word for word in words if isinstance(word, str)]
            _require(all(text.strip(" ") for text in texts), name, "texts of which none is empty", value)
            _require(
                all(len(text) <= MAX_WORD_LENGTH for text in texts), name, f"texts of at most {MAX_WORD_LENGTH} characters", "a longer one"
            )
            _require(_are_token_ids(word for word in words if not isinstance(word, str)), name, f"a list of {kind}", value)

    def _check_token_ids(self) -> None:
        allowed, bias = self.allowed_token_ids, self.logit_bias
        _require(isinstance(allowed, list | tuple | None), "allowed_token_ids", "a list of token ids", allowed)
        size = 1 if allowed is None else len(allowed)
        _require(1 <= size <= MAX_ALLOWED_TOKENS, "allowed_token_ids", f"1 to {MAX_ALLOWED_TOKENS} token ids", f"{size} of them")
        _require(_are_token_ids(allowed or ()), "allowed_token_ids", "a list of token ids", allowed)
        _require(isinstance(bias, dict | None), "logit_bias", "a mapping from token id to number", bias)
        entries = bias or {}
        _require(len(entries) <= MAX_WORDS, "logit_bias", f"at most {MAX_WORDS} entries", len(entries))
        _require(_are_token_ids(entries), "logit_bias", "a mapping from token id to number", bias)
        ok = all(_is_number(value) and -100 <= value <= 100 for value in entries.values())
        _require(ok, "logit_bias", "a mapping to numbers between -100 and 100", bias)

    def _check_processors(self) -> None:
        wanted, given = "a mapping from processor names to mappings of arguments", self.logits_processors
        _require(isinstance(given, dict | None), "logits_processors", wanted, given)
        entries = given or {}
        _require(len(entries) <= MAX_LOGITS_PROCESSORS, "logits_processors", f"at most {MAX_LOGITS_PROCESSORS} processors", len(entries))
        ok = all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in entries.items())
        _require(ok, "logits_processors", wanted, given)

    def _check_best_of(self) -> None:
        _require(self.best_of is None or self.best_of >= self.n, "best_of", f"at least n ({self.n})", self.best_of)

    def _check_beams(self) -> None:
        early = self.early_stopping
        _require(type(early) is bool or early == "never", "early_stopping", 'true, false or "never"', early)
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        if not self.use_beam_search:
            for name in _BEAM_ONLY:
                if getattr(self, name) != defaults[name]:
                    raise RequestError(f"{name} means something with use_beam_search only.", name)
            return
        param, width = self.widest
        _require(width >= 2, "beam_width", "at least 2 (a search of width 1 is temperature 0)", width)
        _require(width >= self.n, param, f"at least n ({self.n})", width)
        _require(self.best_of in (None, width), "best_of", f"unset, or beam_width ({width})", self.best_of)
        off: dict[str, tuple[object, ...]] = {"temperature": (0,), "top_k": (-1,)}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in _WITH_BEAMS and value != defaults[name] and value not in ([], {}) and value not in off.get(name, ()):
                raise RequestError(f"{name} means nothing with use_beam_search, which draws no tokens.", name)

    @property
    def widest(self) -> tuple[str, int]:
        """The sequences that are computed at a time, and the parameter that says so."""
        if self.use_beam_search and self.beam_width is not None:
            return "beam_width", self.beam_width
        return ("n", self.n) if self.best_of is None or self.best_of == self.n else ("best_of", self.best_of)

    @property
    def num_sequences(self) -> int:
        """Sequences that are computed at a time: n of them are returned."""
        return self.widest[1]

    @property
    def num_outputs(self) -> int:
        """Sequences that the engine gives: all those of best_of, for the front to choose from; of a search the n that it has found."""
        return self.n if self.use_beam_search else self.num_sequences

    @property
    def ranks(self) -> bool:
        """The best of several sequences are wanted: there is nothing to return before all have ended."""
        return self.use_beam_search or self.num_sequences > self.n

    @property
    def stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def replace(self, **changes: object) -> SamplingParams:
        return msgspec.structs.replace(self, **changes)


def _require(ok: bool, name: str, wanted: str, got: object) -> None:
    if not ok:
        # What a client sent may be of any length.
        raise RequestError(f"{name} must be {wanted}, not {_shown(got)}.", name)


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:
        # Python refuses to write integers of thousands of digits.
        return f"a {type(value).__name__}"


def _are_token_ids(values: Iterable[object]) -> bool:
    return all(type(i) is int and 0 <= i < 2**31 for i in values)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
