"""The half that works where requests arrive: a wish becomes a grammar that the sampler's half can compile."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from toolkit_lm.errors import RequestError

from toolkit_lm_llguidance.grammars import grammar_of, options_of, schema_of
from toolkit_lm_llguidance.trial import Job
from toolkit_lm_llguidance.trials import Trials
from toolkit_lm_llguidance.vocabulary import Source, Vocabulary
from toolkit_lm_llguidance.wishes import wish_of


class Preparation:
    """What all requests of one renderer share."""

    def __init__(self, renderer: Any) -> None:
        self.source = Source.of(renderer)
        try:
            self.vocabulary = Vocabulary.of(self.source)
        except ValueError as error:
            raise RequestError(f"structured output: llguidance cannot read {self.source.path}: {error}") from None
        self.vocabulary.check(renderer)
        self.trials = Trials(self.source)


_PREPARATIONS: WeakKeyDictionary[Any, Preparation] = WeakKeyDictionary()
"""By renderer: they end with their engine."""
_LOCK = Lock()


def prepare(given: Mapping[str, Any], renderer: Any) -> Mapping[str, Any] | None:
    """The arguments of the sampler's half; None where nothing is asked. Raises RequestError, naming the parameter."""
    wish = wish_of(given)
    if wish is None:
        return None
    with _LOCK:
        shared = _PREPARATIONS.get(renderer)
        if shared is None:
            shared = _PREPARATIONS[renderer] = Preparation(renderer)
    grammar = grammar_of(wish, shared.vocabulary.special_tokens)
    schema = schema_of(wish)
    error = shared.trials.error_of(Job(grammar, schema, options_of(wish) if schema is not None else None))
    if error:
        what = "schema" if schema is not None else wish.kind.replace("_", " ")
        raise RequestError(f"{wish.param}: the {what} cannot be used: {error}.", wish.param)
    return {"grammar": grammar, "tokenizer": shared.source.path, "eos_token_ids": list(shared.source.eos_token_ids)}
