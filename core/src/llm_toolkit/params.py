"""What a user may ask of the output: SamplingParams. It crosses process boundaries, so it is a msgspec struct."""

from __future__ import annotations

import math
import reprlib

import msgspec
from msgspec import Struct

from llm_toolkit.errors import RequestError

MAX_STOPS = 64
MAX_STOP_LENGTH = 1024


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are drawn and when a sequence ends. Names and meanings are vLLM's.

    Raises RequestError (with `param` set) when a value is out of range.
    """

    n: int = 1
    """Sequences per prompt; the prompt is computed once."""
    temperature: float = 1.0
    """0 is greedy. Logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p (Holtzman et al. 2019). In (0, 1]."""
    top_k: int = 0
    """Keep the top_k likeliest tokens. 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest (Nguyen et al. 2024). In [0, 1]."""
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
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            _require(_is_number(value) and _is_finite(value), name, "a finite number", value)
        for name in ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs"):
            value = getattr(self, name)
            optional = name in ("max_tokens", "seed", "logprobs")
            _require(
                (value is None and optional) or (type(value) is int and abs(value) < 2**63), name, "an integer of at most 64 bits", value
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            _require(type(getattr(self, name)) is bool, name, "true or false", getattr(self, name))
        _require(self.n >= 1, "n", "at least 1", self.n)
        _require(0 <= self.temperature <= 1e6, "temperature", "between 0 and 1e6", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or more", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        _require(self.seed is None or self.seed >= 0, "seed", "0 or more", self.seed)
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        most = self.max_tokens if self.max_tokens is not None else self.min_tokens
        _require(self.min_tokens <= most, "min_tokens", f"at most max_tokens ({most})", self.min_tokens)
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more", self.logprobs)
        self._check_stops()

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
        _require(all(type(i) is int and 0 <= i < 2**31 for i in ids), "stop_token_ids", "a list of token ids", self.stop_token_ids)

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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
