"""Errors as llama.cpp words them: {"error": {"code", "message", "type"}}."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.schema_texts import Described

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_TOO_LONG = "context_length_exceeded"


class LlamaErrorDetail(Described):
    code: int
    """The status of the answer."""
    message: str
    type: str
    param: str | None
    """The field that is wrong."""


class LlamaError(Described):
    """The shape of an error."""

    error: LlamaErrorDetail


def worded(error: ApiError) -> dict[str, Any]:
    """The body of an error."""
    detail = error.body["error"]
    kind = _TYPES.get(error.status, "invalid_request_error")
    if detail["code"] == _TOO_LONG:
        kind = "exceed_context_size_error"
    return {
        "error": {
            "code": error.status,
            "message": detail["message"],
            "type": kind,
            "param": detail["param"],
        }
    }


def refusal(error: ApiError) -> Response:
    """The answer to an error."""
    return JSONResponse(worded(error), error.status, error.headers)
