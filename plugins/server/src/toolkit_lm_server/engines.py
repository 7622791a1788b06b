"""The engines of a server, by the names that requests give their models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from toolkit_lm_serving.engine import ServedModel, ServingEngine

from toolkit_lm_server.errors import ApiError, printable

T = TypeVar("T")
U = TypeVar("U")
ModelT = TypeVar("ModelT", bound=ServedModel)


class ByModel(dict[str | None, T]):
    """A value for each served model, by each of the model's names. The key None is for requests
    that name no model.

    A model that is not served raises ApiError (404).
    """

    def __missing__(self, name: str | None) -> NoReturn:
        served = ", ".join(repr(name) for name in self if name is not None)
        raise ApiError(
            404,
            f"The model {printable(name or '')!r} does not exist. This server has {served}.",
            param="model",
            code="model_not_found",
        )

    def each(self, make: Callable[[T], U]) -> ByModel[U]:
        """The values that `make` gives, under the same names. It is called once for each value."""
        made = {id(engine): make(engine) for engine in self.values()}
        return ByModel((name, made[id(engine)]) for name, engine in self.items())


Models = Mapping[str | None, ServedModel]
Engines = ByModel[ServingEngine]


def by_model(*models: ModelT) -> ByModel[ModelT]:
    """Served models by their names, the default first."""
    found: ByModel[ModelT] = ByModel()
    for model in models:
        for name in (*model.config.served_model_names, model.served_model_name):
            found.setdefault(name, model)
    found[None] = models[0]
    return found
