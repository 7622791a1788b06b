"""Errors as Anthropic's API words them."""

from __future__ import annotations

from typing import Any, Literal

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.schema_texts import Described

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetail(Described):
    type: str
    message: str


class AnthropicError(Described):
    """Body of an error."""

    type: Literal["error"]
    error: AnthropicErrorDetail


def error_body(error: ApiError) -> dict[str, Any]:
    """The body of an error, or an event of a stream."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.body["error"]["message"]}}
