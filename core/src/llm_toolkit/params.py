"""What a user may ask of the output: SamplingParams. It crosses process boundaries, so it is a msgspec struct."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

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
            if not isinstance(value := getattr(self, name), int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise RequestError(f"{name} must be a finite number, not {value!r}.", name)
        for name in ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs"):
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "seed", "logprobs"):
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise RequestError(f"{name} must be an integer, not {value!r}.", name)
            if abs(value) >= 2**63:
                raise RequestError(f"{name} must fit in 64 bits, not {value!r}.", name)
        _require(self.n >= 1, "n", "at least 1", self.n)
        _require(0 <= self.temperature <= 1e6, "temperature", "between 0 and 1e6", self.temperature)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or more", self.top_k)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        _require(self.seed is None or self.seed >= 0, "seed", "0 or more", self.seed)
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        _require(self.min_tokens >= 0, "min_tokens", "0 or more", self.min_tokens)
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens ({self.max_tokens})",
            self.min_tokens,
        )
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", "0 or more", self.logprobs)
        self._check_stops()

    def _check_stops(self) -> None:
        stops = self.stop_texts
        _require(all(isinstance(s, str) and s for s in stops), "stop", "one text or a list of texts, none of them empty", self.stop)
        _require(len(stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} texts", len(stops))
        _require(all(len(s) <= MAX_STOP_LENGTH for s in stops), "stop", f"texts of at most {MAX_STOP_LENGTH} characters", "a longer one")
        _require(not stops or self.detokenize, "stop", "unset where detokenize is off", self.stop)
        ids = self.stop_token_ids or []
        _require(all(isinstance(i, int) and 0 <= i < 2**31 for i in ids), "stop_token_ids", "a list of token ids", self.stop_token_ids)
        _require(len(ids) <= MAX_STOPS, "stop_token_ids", f"at most {MAX_STOPS} ids", len(ids))

    @property
    def stop_texts(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def replace(self, **changes: object) -> SamplingParams:
        return msgspec.structs.replace(self, **changes)


def _require(ok: bool, name: str, wanted: str, got: object) -> None:
    if not ok:
        raise RequestError(f"{name} must be {wanted}, not {got!r}.", name)


# A type for fields that hold a token id, so that decoding a message checks the range.
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
