"""Request parameters of the logits processors: the part that runs in the front end. Imports no
torch."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import ProcessorParams, param, require
from toolkit_lm.renderer import Renderer

_MOST_BREAKERS = 2**16
"""Tokens that end a repetition."""
DRY_BREAKERS = ("\n", ":", '"', "*")
"""Default of dry_sequence_breakers: texts that end a repetition."""


class DryParams(ProcessorParams):
    """DRY, "don't repeat yourself".

    The penalty is dry_multiplier * dry_base ** (length - dry_allowed_length), for a repetition of
    `length` tokens.
    """

    changes_forward = False
    dry_multiplier: Annotated[
        float,
        param(
            "DRY (don't repeat yourself): factor of the penalty on tokens that continue a "
            "repetition. 0: off.",
            ge=0,
            le=1000,
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        param(
            "DRY: base of the penalty, whose exponent grows with the repetition.",
            ge=1,
            le=100,
            flag=False,
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int, param("DRY: tokens of the shortest repetition that is penalized.", ge=1, flag=False)
    ] = 2
    dry_sequence_breakers: Annotated[
        list[str | int] | None,
        param(
            "DRY: texts or token ids that no repetition reaches across.",
            none="newline, colon, quotation mark, asterisk",
            max_items=300,
            max_length=256,
            flag=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.dry_sequence_breakers or []
        blank = any(isinstance(word, str) and not word.strip(" ") for word in words)
        require(not blank, "dry_sequence_breakers", "texts of which none is blank", words)

    def prepare(self, renderer: Renderer) -> Mapping[str, Any] | None:
        # Ids of breakers that are texts may be others than the model has: they never come up.
        for breaker in self.dry_sequence_breakers or ():
            if isinstance(breaker, int) and breaker >= (vocab_size := _vocab_size(renderer)):
                name = "dry_sequence_breakers"
                raise RequestError(
                    f"token id {breaker} is not in the vocabulary, which has the ids from 0 to "
                    f"{vocab_size - 1}.",
                    name,
                )
        if not self.dry_multiplier:
            return None
        breakers = (
            DRY_BREAKERS if self.dry_sequence_breakers is None else self.dry_sequence_breakers
        )
        return {
            "multiplier": self.dry_multiplier,
            "base": self.dry_base,
            "allowed_length": self.dry_allowed_length,
            "breakers": _breaking_tokens(breakers, renderer),
        }


class XtcParams(ProcessorParams):
    """XTC, "exclude top choices"."""

    changes_forward = False
    xtc_probability: Annotated[
        float,
        param(
            "XTC (exclude top choices): probability that it applies to a draw. 0: off.", ge=0, le=1
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        param(
            "XTC: probability from which a token is a top choice. Only the least likely top "
            "choice is kept.",
            ge=0,
            le=1,
        ),
    ] = 0.1

    def prepare(self, renderer: Renderer) -> Mapping[str, Any] | None:
        return (
            {"probability": self.xtc_probability, "threshold": self.xtc_threshold}
            if self.xtc_probability
            else None
        )


_USUAL_TAU = 5.0
"""Bits, where a request turns mirostat on and says no more: llama.cpp's default."""


class MirostatParams(ProcessorParams):
    """Mirostat 2.0 (Basu et al. 2021)."""

    changes_forward = False

    mirostat: Annotated[
        int | None,
        param(
            "Mirostat, as llama.cpp and Ollama turn it on. 0: off. 2: version 2.0.",
            none="on where mirostat_tau is given",
            ge=0,
            le=2,
            flag=False,
        ),
    ] = None
    mirostat_tau: Annotated[
        float | None,
        param("Mirostat 2.0: target surprise of a token, in bits.", none="off", gt=0, le=100),
    ] = None
    mirostat_eta: Annotated[
        float, param("Mirostat 2.0: learning rate.", ge=0, le=1, flag=False)
    ] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.mirostat != 1, "mirostat", "0 or 2 (the first version is not there)", 1)

    def prepare(self, renderer: Renderer) -> Mapping[str, Any] | None:
        tau = self.mirostat_tau
        if self.mirostat is not None:
            tau = (tau or _USUAL_TAU) if self.mirostat else None
        return {"tau": tau, "eta": self.mirostat_eta} if tau else None


class NgramParams(ProcessorParams):
    """No sequence of tokens comes twice."""

    changes_forward = False
    no_repeat_ngram_size: Annotated[
        int,
        param(
            "No sequence of so many tokens comes twice, in prompt and output together. 0: off.",
            ge=0,
            le=2**31 - 1,
        ),
    ] = 0

    def prepare(self, renderer: Renderer) -> Mapping[str, Any] | None:
        return {"size": self.no_repeat_ngram_size} if self.no_repeat_ngram_size else None


class EpsilonParams(ProcessorParams):
    """Hewitt, Manning and Liang 2022, "Truncation Sampling as Language Model Desmoothing"."""

    changes_forward = False
    epsilon_cutoff: Annotated[
        float,
        param(
            "Drop the tokens that are less likely than this, but for the likeliest. 0: off.",
            ge=0,
            le=1,
        ),
    ] = 0.0

    def prepare(self, renderer: Renderer) -> Mapping[str, Any] | None:
        return {"epsilon": self.epsilon_cutoff} if self.epsilon_cutoff else None


class TypicalParams(ProcessorParams):
    """Meister et al. 2022, "Locally Typical Sampling"."""

    changes_forward = False
    typical_p: Annotated[
        float,
        param(
            "Typical sampling: keep tokens of about average surprise that together have this "
            "probability.",
            gt=0,
            le=1,
        ),
    ] = 1.0
    """Tokens are taken in the order of how far their surprise is from the entropy."""

    def prepare(self, renderer: Renderer) -> Mapping[str, Any] | None:
        return {"p": self.typical_p} if self.typical_p < 1 else None


def _vocab_size(renderer: Renderer) -> int:
    of_all = renderer.config.hf_config
    of_text = of_all.get("text_config") or {}
    size: int = of_text.get("vocab_size") or of_all.get("vocab_size") or renderer.vocab_size
    return size


class _Texts:
    """The texts of a vocabulary, one after the other."""

    def __init__(self, renderer: Renderer) -> None:
        pieces = renderer.token_bytes(range(_vocab_size(renderer)))
        # No text has the byte 255.
        self._joined = b"\xff".join(pieces)
        self._ends = list(accumulate(len(piece) + 1 for piece in pieces))

    def with_text(self, text: bytes) -> set[int]:
        """The tokens that have it."""
        return {
            bisect_right(self._ends, match.start())
            for match in re.finditer(re.escape(text), self._joined)
        }


_known: WeakKeyDictionary[Renderer, _Texts] = WeakKeyDictionary()
"""Token texts by renderer, kept because collecting them is slow."""


def _breaking_tokens(breakers: Sequence[str | int], renderer: Renderer) -> list[int]:
    """The token ids; of texts all tokens that have one of them, such as ".\\n" of "\\n", and the
    last of the text's own."""
    found = {breaker for breaker in breakers if isinstance(breaker, int)}
    texts = [breaker for breaker in breakers if isinstance(breaker, str)]
    found |= {_last_token(text, renderer) for text in texts}
    if texts and renderer not in _known:
        _known[renderer] = _Texts(renderer)
    for text in texts:
        found |= _known[renderer].with_text(text.encode())
        if len(found) > _MOST_BREAKERS:
            name = "dry_sequence_breakers"
            raise RequestError(
                f"{name}: more than {_MOST_BREAKERS} tokens have one of these texts: give longer "
                "ones.",
                name,
            )
    return sorted(found)


def _last_token(text: str, renderer: Renderer) -> int:
    # A letter before a text keeps tokenizers from joining it with the beginning of a sequence.
    try:
        token_ids = renderer.render_prompt(f"a{text}", add_special_tokens=False).token_ids
    except RequestError as error:
        name = "dry_sequence_breakers"
        raise RequestError(f"{name}: {text!r} cannot be tokenized: {error}", name) from None
    return token_ids[-1]
