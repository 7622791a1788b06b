"""Further names of a served model: the engine with something more, such as an adapter. Plugins'
routes add them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, cast

from toolkit_lm_serving.engine import ServingEngine


class Alias(NamedTuple):
    """What a name stands for, beside the model."""

    root: str
    """Where it is from, as /v1/models shows it."""
    context: Mapping[str, str]
    """Added to the context of each request, where a part reads it."""


class AliasSource(Protocol):
    """Names that a plugin brings. They may change at any time."""

    def find(self, name: str) -> Alias | None:
        """What a name stands for; None: it is unknown."""

    def names(self) -> Iterable[str]:
        """The names that /v1/models lists."""


class Aliases:
    """The sources of names."""

    def __init__(self) -> None:
        self._sources: list[AliasSource] = []

    def add(self, source: AliasSource) -> None:
        """Adds a source, after the ones that there are."""
        self._sources.append(source)

    def find(self, name: str) -> Alias | None:
        """The alias that the first source has that knows the name."""
        found = (source.find(name) for source in self._sources)
        return next((alias for alias in found if alias is not None), None)

    def names(self) -> list[str]:
        return [name for source in self._sources for name in source.names()]


class AliasEngine:
    """An engine under another name: its requests have the alias's context."""

    def __init__(self, engine: ServingEngine, name: str, alias: Alias) -> None:
        self._engine = engine
        self.served_model_name = name
        self._context = alias.context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _with(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        named = options or {}
        return {**named, "context": {**named.get("context", {}), **self._context}}

    def generate(self, *arguments: Any, **options: Any) -> Any:
        return self._engine.generate(*arguments, **self._with(options))

    def generate_many(self, *arguments: Any, **options: Any) -> Any:
        return self._engine.generate_many(*arguments, **self._with(options))

    def chat(self, *arguments: Any, options: Any = None, **others: Any) -> Any:
        return self._engine.chat(*arguments, options=cast(Any, self._with(options)), **others)

    def chat_many(self, *arguments: Any, options: Any = None, **others: Any) -> Any:
        return self._engine.chat_many(*arguments, options=cast(Any, self._with(options)), **others)

    def encode(self, *arguments: Any, **options: Any) -> Any:
        return self._engine.encode(*arguments, **self._with(options))

    def encode_many(self, *arguments: Any, **options: Any) -> Any:
        return self._engine.encode_many(*arguments, **self._with(options))


Under = Callable[[Any, str, Alias], Any]
"""What a name has, made of what the default model has."""


def engine_under(engine: Any, name: str, alias: Alias) -> Any:
    """The engine as requests with that name of an alias get it."""
    return AliasEngine(engine, name, alias)
