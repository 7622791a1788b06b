"""Flags for sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from toolkit_lm.errors import ConfigError, RequestError, nearest
from toolkit_lm.params import SamplingParams

HELP = {
    "n": "Sequences per prompt.",
    "best_of": "Sequences to compute, of which the n likeliest are given.",
    "use_beam_search": "Search for the n likeliest sequences.",
    "beam_width": "Sequences that a beam search goes on with.",
    "length_penalty": "Beam search: above 0 favors long sequences, below 0 short ones.",
    "early_stopping": "When a beam search is over: true, false or never.",
    "max_tokens": "Most output tokens. none: as many as fit.",
    "temperature": "Randomness; 0 is greedy.",
    "top_p": "Draw from the likeliest tokens that together reach this probability.",
    "top_k": "Draw from this many likeliest tokens. 0: all.",
    "min_p": "Drop tokens less likely than this times the likeliest.",
    "typical_p": "Draw from the tokens of typical surprise that together reach this probability.",
    "xtc_probability": "How often to leave out the top choices.",
    "xtc_threshold": "Tokens at least this likely are top choices.",
    "mirostat_tau": "Steer the surprise of each token to this many bits.",
    "repetition_penalty": "Above 1: makes tokens of prompt and output less likely.",
    "presence_penalty": "Taken off the logits of tokens that are in the output.",
    "frequency_penalty": "The same, for each time that they are.",
    "dry_multiplier": "Above 0: makes going on as in an earlier place less likely.",
    "bad_words": "Text that the output is not to hold; may be given several times.",
    "seed": "Makes the draw repeatable.",
    "stop": "Text that ends the output; may be given several times.",
    "stop_token_ids": "Token id that ends the output; may be given several times.",
    "min_tokens": "Fewest output tokens.",
    "truncate_prompt_tokens": "Read only so many of the prompt's last tokens. -1: as many as leave room for the output.",
    "ignore_eos": "Go on after an end-of-sequence token.",
}
"""The parameters that have a flag."""

_TYPES = get_type_hints(SamplingParams)


class SamplingFlags(dict[str, Any]):
    """The sampling parameters given on the command line; a command that has an argument of this type gets a flag for each parameter."""

    def params(self, overrides: Mapping[str, Any] | None = None, **defaults: Any) -> SamplingParams:
        """`overrides` over the given flags over `defaults`. Raises RequestError for an unknown name or a value out of range."""
        merged = {**defaults, **self, **(overrides or {})}
        for name in merged:
            if name not in _TYPES:
                raise RequestError(f"unknown sampling parameter {name!r}. {nearest(name, _TYPES)}", name)
        try:
            return msgspec.convert(merged, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from None
            raise RequestError(f"wrong sampling parameters: {error}") from None


def parse_flags(values: Mapping[str, Any]) -> SamplingFlags:
    """SamplingFlags from texts, as flags carry them. Raises ConfigError."""
    flags = SamplingFlags()
    for name, value in values.items():
        wanted = None if value == "none" else value
        try:
            flags[name] = msgspec.convert(wanted, _TYPES[name], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"option '--{name.replace('_', '-')}': {value!r} is no value: {error}") from None
    try:
        flags.params()
    except RequestError as error:
        raise ConfigError(f"option '--{(error.param or '').replace('_', '-')}': {error}") from None
    return flags
