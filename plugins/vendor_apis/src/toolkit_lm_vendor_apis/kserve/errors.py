"""Errors as the Open Inference Protocol words them: {"error"}."""

from __future__ import annotations

from fastapi import Response
from fastapi.responses import JSONResponse
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.schema_texts import Described


class KserveError(Described):
    """The shape of an error."""

    error: str
    """What is wrong."""


def refusal(error: ApiError) -> Response:
    """The answer to an error."""
    message = error.body["error"]["message"]
    return JSONResponse({"error": message}, error.status, error.headers)
