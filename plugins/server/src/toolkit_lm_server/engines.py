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
    """One thing for each served model, by each of the model's names. None: what a request gets that
    names no model.

    A model that is not served raises ApiError (404).
    """

    def __missing__(self, name: str | None) -> NoReturn:
        served = ", ".join(repr(one) for one in self if one is not None)
        raise ApiError(
            404,
            f"The model {printable(name or '')!r} does not exist. This server has {served}.",
            param="model",
            code="model_not_found",
        )

    def each(self, make: Callable[[T], U]) -> ByModel[U]:
        """The same names, with what `make` gives for each thing. It is called once for each."""
        made = {id(one): make(one) for one in self.values()}
        return ByModel((name, made[id(one)]) for name, one in self.items())


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
