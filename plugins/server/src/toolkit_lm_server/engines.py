"""The engines of a server, by the names that requests give their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from toolkit_lm_serving.engine import ServedModel, ServingEngine

from toolkit_lm_server.aliases import Aliases, Under, engine_under
from toolkit_lm_server.errors import ApiError, printable

T = TypeVar("T")
U = TypeVar("U")
ModelT = TypeVar("ModelT", bound=ServedModel)


_MOST_NAMES = 50
"""Most names that an error lists."""


class ByModel(dict[str | None, T]):
    """A value for each served model, by each of the model's names. The key None is for requests
    that name no model.

    An alias has what the default model has. A model that is not served raises ApiError (404).
    """

    aliases = Aliases()
    """Further names, which plugins' routes bring."""
    _under: Under | None = None

    def __missing__(self, name: str | None) -> T:
        if name is not None and (alias := self.aliases.find(name)) is not None:
            own = self[None]
            return own if self._under is None else cast(T, self._under(own, name, alias))
        raise self.unknown(name)

    def unknown(self, name: str | None) -> ApiError:
        """The error of a name that no model has."""
        names = (*filter(None, self), *self.aliases.names())
        served = ", ".join(map(repr, names[:_MOST_NAMES]))
        if len(names) > _MOST_NAMES:
            served += f" and {len(names) - _MOST_NAMES} more"
        return ApiError(
            404,
            f"The model {printable(name or '')!r} does not exist. This server has {served}.",
            param="model",
            code="model_not_found",
        )

    def set_under(self, under: Under) -> None:
        """Sets what an alias has, made of what the default model has."""
        self._under = under

    def each(self, make: Callable[[T], U]) -> ByModel[U]:
        """The values that `make` gives, under the same names. It is called once for each value."""
        made = {id(engine): make(engine) for engine in self.values()}
        each = ByModel((name, made[id(engine)]) for name, engine in self.items())
        each.aliases = self.aliases
        return each


Models = Mapping[str | None, ServedModel]
Engines = ByModel[ServingEngine]


def by_model(*models: ModelT) -> ByModel[ModelT]:
    """Served models by their names, the default first."""
    found: ByModel[ModelT] = ByModel()
    for model in models:
        for name in (*model.config.served_model_names, model.served_model_name):
            found.setdefault(name, model)
    found[None] = models[0]
    found.aliases = Aliases()
    return found


def by_engine(engine: ServingEngine) -> Engines:
    """The engine by its names. Plugins may add aliases."""
    found = by_model(engine)
    found.set_under(engine_under)
    return found
