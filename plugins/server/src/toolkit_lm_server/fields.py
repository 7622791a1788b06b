"""Fields of bodies: lists that tell their first wrong item, and what parameters become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, get_origin

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from toolkit_lm.config import Option
from toolkit_lm.param_spec import spec_of

_ELSEWHERE = ("logprobs", "detokenize", "extra_args")
"""Each route has a field `logprobs` of its own, an answer is text, and the parameters of plugins
have fields as core's have."""


class _FailFast:
    """As pydantic.FailFast, and hashable, which members of unions must be."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "fail_fast": True}


Item = TypeVar("Item")
Items = Annotated[list[Item], _FailFast()]
"""A list of which the first wrong item is told. A body has room for millions of them, and each
error costs time and memory."""


def parameter_fields(params: Mapping[str, Option]) -> dict[str, Any]:
    """Type and default of each parameter's field. None: not given."""
    return {
        name: (Union[(*map(_body_type, o.kinds), None)], _described(o))
        for name, o in params.items()
        if name not in _ELSEWHERE
    }


def _body_type(kind: Any) -> Any:
    """The type of a parameter's field: lists tell their first wrong item, and mappings are left to
    the parameter's own check."""
    if get_origin(kind) is list:
        return Annotated[kind, _FailFast()]
    # JSON can only write token ids as text where they are keys.
    return dict[str, Any] if get_origin(kind) is dict else kind


def _described(o: Option) -> Any:
    """The description has the parameter's bounds. SamplingParams checks them: its errors name
    them."""
    spec = spec_of(o)
    bounds: dict[str, Any] = {"minimum": spec.ge, "exclusiveMinimum": spec.gt, "maximum": spec.le}
    bounds |= {"maxItems": spec.max_items, "maxLength": spec.max_length}
    if any(get_origin(kind) is dict for kind in o.kinds):
        bounds = {"maxProperties": spec.max_items}
    return Field(
        None,
        description=o.help,
        json_schema_extra={name: value for name, value in bounds.items() if value is not None},
    )
