"""Errors as Text Embeddings Inference words them: {"error", "error_type"}."""

from __future__ import annotations

from typing import Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.schema_texts import Described

_TYPES = {424: "Backend", 429: "Overloaded", 503: "Unhealthy"}
_TOO_LONG = "context_length_exceeded"


class TeiError(Described):
    """The shape of an error."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer"]


def refusal(error: ApiError) -> Response:
    """The answer to an error. An input that is too long has the status 413."""
    detail = error.body["error"]
    status = 413 if detail["code"] == _TOO_LONG else error.status
    kind = _TYPES.get(status, "Backend" if status >= 500 else "Validation")
    return JSONResponse({"error": detail["message"], "error_type": kind}, status, error.headers)
