"""Texts and shapes of fields in the description of the API."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import definitions_schema
from toolkit_lm.params import SAMPLING_PARAMS


class Described(BaseModel):
    """A model whose JSON schema describes each field by the docstring below it. A sampling
    parameter without one has the parameter's own text."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        resolved = handler.resolve_ref_schema(schema)
        texts = texts_of(cls)
        for name, part in resolved.get("properties", {}).items():
            text = texts.get(name) or (o.help if (o := SAMPLING_PARAMS.get(name)) else None)
            if text is not None:
                part.setdefault("description", text)
        return schema


def texts_of(kind: type) -> dict[str, str]:
    """The docstrings of a class's fields, by name. Those of bases count where it has none."""
    return {
        name: text
        for base in reversed(kind.__mro__)
        for name, text in _texts(base.__module__).get(base.__name__, {}).items()
    }


@cache
def _texts(module: str) -> dict[str, dict[str, str]]:
    """The docstrings of the fields of a module's classes. They are read of the source when
    somebody asks for the description, so that no start pays for it."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return {}
    return {
        node.name: dict(_docstrings(node))
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _docstrings(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(node.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            yield field.target.id, " ".join(text.value.value.split())


class ShapeOf:
    """An annotation of a mapping that is checked elsewhere: its JSON schema is that of a model."""

    def __init__(self, kind: type[BaseModel]) -> None:
        self._kind = kind

    def __get_pydantic_json_schema__(
        self, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        # This handler skips the outermost schema's own hooks and name, so that one is around it.
        return handler(definitions_schema(self._kind.__pydantic_core_schema__, []))


class Open(Described):
    """An object that may have other members, too."""

    model_config = ConfigDict(extra="allow")
