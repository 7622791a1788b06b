"""The half that works where requests arrive: a wish becomes a grammar that the sampler's half can
compile."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from toolkit_lm.errors import RequestError, nearest
from toolkit_lm.plugin import Plugins

from toolkit_lm_structured_output.contract import Source, WishReader
from toolkit_lm_structured_output.registry import StructuredOutputRegistry
from toolkit_lm_structured_output.trial import Job
from toolkit_lm_structured_output.trials import Trials
from toolkit_lm_structured_output.wishes import wish_of

_PREFERRED = "llguidance"


class Preparation:
    """State shared by all requests of one renderer."""

    def __init__(self, renderer: Any) -> None:
        self.source = Source.of(renderer)
        self.reader = _reader(renderer.plugins or Plugins.load(renderer.config.plugins))(
            self.source, renderer
        )
        self.trials = Trials(self.source, self.reader.compiler)


_PREPARATIONS: WeakKeyDictionary[Any, Preparation] = WeakKeyDictionary()
"""Preparations by renderer; each ends with its engine."""
_LOCK = Lock()


def prepare(params: Mapping[str, Any], renderer: Any) -> Mapping[str, Any] | None:
    """The arguments of the sampler's half; None where nothing is asked. Raises RequestError, naming
    the parameter."""
    wish = wish_of(params)
    if wish is None:
        return None
    with _LOCK:
        shared = _PREPARATIONS.get(renderer)
        if shared is None:
            shared = _PREPARATIONS[renderer] = Preparation(renderer)
    grammar, details = shared.reader.read(wish)
    error = shared.trials.error_of(Job(grammar, details))
    if error:
        noun = "schema" if wish.kind in ("json", "json_object") else wish.kind.replace("_", " ")
        raise RequestError(f"{wish.param}: the {noun} cannot be used: {error}.", wish.param)
    source = shared.source
    return {
        "grammar": grammar,
        "compiler": shared.reader.compiler,
        "tokenizer": source.path,
        "eos_token_ids": list(source.eos_token_ids),
        "vocab_size": source.size,
    }


def _reader(plugins: Plugins) -> type[WishReader]:
    """Reader of the backend that the option names. Raises RequestError if it is not installed."""
    registry = plugins.brought_registry(StructuredOutputRegistry)
    known = [entry.key for entry in registry.entries()]
    wanted = plugins.options("structured_output").backend
    if not known:
        raise RequestError(
            "structured output: nothing that compiles grammars is installed; pip install "
            "toolkit-lm-llguidance."
        )
    if wanted == "auto":
        wanted = _PREFERRED if _PREFERRED in known else known[0]
    if wanted not in known:
        raise RequestError(
            f"structured output: the option structured_output.backend names {wanted!r}. "
            f"{nearest(wanted, known)}"
        )
    reader: type[WishReader] = registry.load(wanted)
    return reader
