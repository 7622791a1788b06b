"""Fingerprints of engines: the field system_fingerprint of answers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec
from toolkit_lm import __version__

from toolkit_lm_server.engines import Engines

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_DIGITS = 12


class Fingerprints:
    """Fingerprints of the served models, by the names of requests. Answers with equal ones come
    from one version, one set of plugins and one resolved config."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._made: dict[str, str] = {}
        """Fingerprints by the first name of each model."""

    def __getitem__(self, model: str | None) -> str:
        """The fingerprint of a model. Raises ApiError (404) for one that is not served."""
        engine = self._engines[model]
        name = engine.served_model_name
        if name not in self._made:
            if len(self._made) >= _MOST:
                self._made.clear()
            self._made[name] = fingerprint_of(engine)
        return self._made[name]


_MOST = 256
"""Most fingerprints that are kept: adapters come and go."""


def fingerprint_of(engine: ServingEngine) -> str:
    """A short digest of the version, the plugins and the resolved config of an engine."""
    known = [__version__, engine.plugins.fingerprint().digest, engine.served_model_name]
    state = msgspec.json.encode([*known, engine.config], enc_hook=_name_of)
    return f"fp_{hashlib.sha256(state).hexdigest()[:_DIGITS]}"


def _name_of(value: Any) -> str:
    return type(value).__qualname__
