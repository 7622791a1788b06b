"""Errors as OpenAI's API words them: a status, and {"error": {"message", "type", "param",
"code"}}."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from toolkit_lm.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    ToolkitError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER = 5
"""Seconds after which a client may come again, where nobody knows better."""
_NAME = 200
_MESSAGE = 1000
"""Characters of a client's name, and of a message, that are sent back."""
_TYPES = {429: "rate_limit_exceeded"}
VLLM_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""By status, an error's type on routes that vLLM has and OpenAI has not."""
_PROBLEMS = 2
_PART = 120
"""Wrong values of a body of which all is told, and most characters of each part of it."""
_BRANCHES = {"str", "int", "float", "bool", "dict", "list", "none"}
"""What pydantic calls the members of a union, beside words that are no names."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """What an error looks like, for the description of the API."""

    error: ErrorDetail


_MEANINGS = {
    400: "The request is wrong.",
    401: "The API key is wrong or missing.",
    404: "The model is not served.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests wait, or cost too much together, or a limit of the key is met.",
    500: "The server or the model failed.",
    502: "A render server's answer cannot be used.",
    503: "Requests are not served now.",
    504: "The request's timeout was over.",
}


Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], fields: Mapping[str, Any]) -> Model:
    """A body of fields that are not checked yet. Raises RequestValidationError, as where FastAPI
    reads a body."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        ) from None


def described(*statuses: int, kind: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """The answers with these statuses, for the description of the API. `kind`: what an error looks
    like."""
    return {status: {"model": kind, "description": _MEANINGS[status]} for status in statuses}


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        param = None if param is None else printable(param)
        self.body = {
            "error": {
                "message": printable(message, _MESSAGE),
                "type": kind,
                "param": param,
                "code": code,
            }
        }
        self.in_full: str | None = None
        """The message with what pydantic says of each wrong value, for clients of OpenAI's API and
        vLLM's."""
        self.beside: dict[str, str] = {}
        """Fields beside the error."""

    def response(self, types: Mapping[int, str] = MappingProxyType({})) -> JSONResponse:
        """`types`: by status, what the error's type is, in the place of OpenAI's."""
        told = self.body["error"]
        changed = {
            "message": self.in_full or told["message"],
            "type": types.get(self.status, told["type"]),
        }
        return JSONResponse(
            {**self.beside, "error": {**told, **changed}}, self.status, self.headers
        )


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error as another API has it. `names`: by field, what that API calls it."""
    told = error.body["error"]
    ours = told["param"]
    message = told["message"] or ""
    if ours is None or (param := names.get(ours)) is None:
        return error
    return ApiError(
        error.status,
        message.replace(ours, param),
        param=param,
        code=told["code"],
        headers=error.headers,
    )


def missing(field: str) -> ApiError:
    """The error of a field that must be given."""
    return ApiError(
        400,
        f"You must provide the parameter {field!r}.",
        param=field,
        code="missing_required_parameter",
    )


def printable(text: str, most: int = _NAME) -> str:
    """The beginning of a client's text as it can be sent back: JSON may name lone surrogates, which
    UTF-8 cannot."""
    return (
        (text if len(text) <= most else f"{text[:most]}...")
        .encode(errors="backslashreplace")
        .decode()
    )


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of `error`. What is not the client's business goes to the log only."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case RequestError():
            param = "prompt" if error.param == "prompt_token_ids" else error.param
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            return ApiError(400, str(error), param=param, code=code)
        case RequestValidationError():
            return _of_validation(error.errors())
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead")
        case ToolkitError() if (status := getattr(error, "http_status", None)) is not None:
            # A plugin's: what else is there has failed, and the request is not to blame.
            again = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
            return ApiError(status, str(error), code=getattr(error, "code", None), headers=again)
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The server failed on this request.", code="internal_error")


def _of_validation(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Of pydantic's complaints, of which there is one for each member of a union, those of several
    places."""
    first = problems[0]
    places = {_place(problem["loc"]): problem for problem in reversed(problems)}
    error = _of_problem(first)
    if (
        first["type"] not in ("json_invalid", "unknown", "unsupported", "two_names")
        and len(first["loc"]) > 1
    ):
        told = ", ".join(
            _in_full(place, problem)
            for place, problem in list(reversed(places.items()))[:_PROBLEMS]
        )
        message = error.body["error"]["message"]
        count = len(places)
        rest = f", and {count - _PROBLEMS} more errors" if count > _PROBLEMS else ""
        whole = (
            f"{message} (1 validation error: {told})"
            if count == 1
            else f"{count} validation errors: {message} {told}{rest}"
        )
        error.in_full = printable(whole, 2 * _MESSAGE)
    return error


def _place(loc: Sequence[int | str]) -> str:
    """Where a wrong value is, as vLLM writes it: "body.messages.0.content", without what pydantic
    calls a union's members."""
    start, *path = loc
    return ".".join(map(str, (start, *_path(path))))[:_PART]


def _path(path: Sequence[int | str]) -> list[int | str]:
    return [
        part
        for index, part in enumerate(path)
        if isinstance(part, int) or index == 0 or (part.isidentifier() and part not in _BRANCHES)
    ]


def _in_full(place: str, problem: Mapping[str, Any]) -> str:
    told = {"type": problem["type"], "loc": place, "msg": problem["msg"][:_PART]}
    return str(
        told
        if problem["type"] == "missing"
        else {**told, "input": _described_input(problem.get("input"))}
    )


def _described_input(value: Any) -> Any:
    """What a client sent, which may be of any size."""
    match value:
        case list() | tuple():
            return f"<list of {len(value)} items>"
        case dict():
            return f"<dict of {len(value)} items>"
        case str():
            return value if len(value) <= _PART else f"{value[:_PART]}... [truncated]"
        case int() if abs(value) >= 10**_PART:
            return "<integer of many digits>"
        case None | bool() | int() | float():
            return value
        case _:
            return f"<{type(value).__name__}>"


def _of_problem(problem: Mapping[str, Any]) -> ApiError:
    """pydantic's complaint of one value. `loc` is ("body", field, ...), or ("body", offset) where
    the body is no JSON."""
    _, *path = problem["loc"]
    path = _path(path)
    field = path[0] if path and isinstance(path[0], str) else None
    match problem["type"]:
        case "json_invalid":
            return ApiError(
                400,
                "The body is not valid JSON: "
                f"{problem.get('ctx', {}).get('error', 'it cannot be parsed')}.",
            )
        case "unknown":
            return ApiError(400, problem["msg"], param=field or problem["ctx"]["param"])
        case "missing" if field is not None:
            return missing(field)
        case "unsupported":
            return ApiError(
                400, problem["msg"], param=problem["ctx"]["param"], code="unsupported_parameter"
            )
        case "two_names":
            return ApiError(400, problem["msg"], param=problem["ctx"]["param"])
        case _ if field is None:
            return ApiError(
                400,
                "The body must be a JSON object, sent with the header 'content-type: "
                "application/json'.",
            )
        case _:
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[
                1:
            ]
            return ApiError(400, f"Invalid value for {where!r}: {problem['msg']}.", param=field)
