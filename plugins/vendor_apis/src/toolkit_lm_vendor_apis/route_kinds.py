"""Routes that word errors as a vendor does: those of the key check and the limits of bodies,
too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from fastapi import APIRouter, Response
from pydantic import BaseModel
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.route import ServerRoute


def route_kind(
    router: APIRouter, body: type[BaseModel], refusal: Callable[[ApiError], Response], **more: Any
) -> type[ServerRoute]:
    """The class of a router's routes. `body`: what `refusal` makes of an error, for the description
    of the API. `more`: of the class."""
    kind = type(
        "VendorRoute",
        (router.route_class,),
        {"refusal": staticmethod(refusal), "error_body": body, **more},
    )
    return cast("type[ServerRoute]", kind)
