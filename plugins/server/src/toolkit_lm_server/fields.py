"""Fields of bodies: lists that report their first wrong item, and fields of sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, get_origin

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema
from toolkit_lm.config import Option
from toolkit_lm.param_spec import spec_of

_ELSEWHERE = ("logprobs", "detokenize", "extra_args")
"""Sampling parameters without a field here. Each route has its own `logprobs`, an answer is text,
and plugins' parameters have fields like core's."""


class _FailFast:
    """pydantic.FailFast, made hashable, which members of unions must be."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        schema = handler(source)
        assert schema["type"] == "list"
        return {**schema, "fail_fast": True}


Item = TypeVar("Item")
Items = Annotated[list[Item], _FailFast()]
"""A list that reports its first wrong item only. A body has room for millions of items, and each
error costs time and memory."""


def parameter_fields(params: Mapping[str, Option]) -> dict[str, Any]:
    """Type and default of each parameter's field. None stands for a parameter that is not given."""
    return {
        name: (Union[(*map(_body_type, o.kinds), None)], _described(o))
        for name, o in params.items()
        if name not in _ELSEWHERE
    }


def _body_type(kind: Any) -> Any:
    """The type of a parameter's field. Lists report their first wrong item. Mappings are left to
    the parameter's own check."""
    if get_origin(kind) is list:
        return Annotated[kind, _FailFast()]
    # JSON can only write token ids as text where they are keys.
    return dict[str, Any] if get_origin(kind) is dict else kind


_LEAST = {"stop": {"minLength": 1}, "allowed_token_ids": {"minItems": 1}}
"""Bounds of parameters that only their own checks state."""


def _described(o: Option) -> Any:
    """The parameter's bounds, for the description of the API. SamplingParams checks them, and its
    errors name them."""
    spec = spec_of(o)
    bounds: dict[str, Any] = {"minimum": spec.ge, "exclusiveMinimum": spec.gt, "maximum": spec.le}
    bounds |= {"maxItems": spec.max_items, "maxLength": spec.max_length}
    bounds |= _LEAST.get(o.name, {})
    if any(get_origin(kind) is dict for kind in o.kinds):
        bounds = {"maxProperties": spec.max_items}
    return Field(
        None,
        description=o.help,
        json_schema_extra={name: value for name, value in bounds.items() if value is not None},
    )
