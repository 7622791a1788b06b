"""The description of a pool's routes, and of those of its models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI

_PREFIX = "#/components/schemas/"
_COLD = "The routes of models are described here once a model has been loaded."


def describe(app: FastAPI, loaded: Callable[[], FastAPI | None]) -> None:
    """Has /openapi.json describe the routes of `app`, and of the models besides. `loaded`: the
    routes of a model that is loaded, or was. All models have the same."""
    own = app.openapi

    def openapi() -> dict[str, Any]:
        theirs = loaded()
        whole = own()
        if theirs is None:
            return {**whole, "info": {**whole["info"], "description": _COLD}}
        return merged(whole, theirs.openapi())

    app.openapi = openapi  # type: ignore[method-assign]


def merged(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """A description with the paths of both. A path of both is the first one's, and a schema that
    differs under one name gets another name in the second."""
    mine = own.get("components", {}).get("schemas", {})
    other = theirs.get("components", {}).get("schemas", {})
    names = {
        name: f"{name}OfModel" for name, schema in other.items() if mine.get(name, schema) != schema
    }
    text = json.dumps(theirs)
    for name, new in names.items():
        text = text.replace(json.dumps(_PREFIX + name), json.dumps(_PREFIX + new))
    renamed = json.loads(text)
    paths = {**renamed["paths"], **own["paths"]}
    found = {names.get(name, name): other for name, other in _schemas(renamed).items()}
    schemas = {**found, **mine}
    kept: dict[str, Any] = {}
    _keep(paths, schemas, kept)
    components = {**renamed.get("components", {}), **own.get("components", {})}
    return {**own, "paths": paths, "components": {**components, "schemas": kept}}


def _schemas(description: Mapping[str, Any]) -> dict[str, Any]:
    return dict(description.get("components", {}).get("schemas", {}))


def _keep(part: Any, schemas: Mapping[str, Any], kept: dict[str, Any]) -> None:
    """Adds the schemas that a part of a description refers to, to `kept`."""
    parts = [part]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, Mapping):
            parts += part.values()
            # A discriminator maps values to references.
            for value in part.values():
                name = value.removeprefix(_PREFIX) if isinstance(value, str) else ""
                if isinstance(value, str) and value.startswith(_PREFIX) and name not in kept:
                    kept[name] = schemas[name]
                    parts.append(schemas[name])
