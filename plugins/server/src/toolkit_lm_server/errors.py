"""Errors as OpenAI's API words them: a status, and {"error": {"message", "type", "param",
"code"}}."""

from __future__ import annotations

import json
import logging
import math
import re
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

from toolkit_lm_server.schema_texts import Described
from toolkit_lm_server.wanted_values import wanted

logger = logging.getLogger(__name__)

RETRY_AFTER = 5
"""Seconds after which a client may come again, where no better time is known."""
_NAME = 200
_MESSAGE = 1000
"""Most characters of a message that are sent back, as `_NAME` is of a client's name."""
_TYPES = {429: "rate_limit_exceeded"}
VLLM_TYPES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}
"""Types of errors by status, for routes that vLLM has and OpenAI has not."""
_PLACES = 2
"""Most wrong values of a body that an error describes. The others are counted."""
_PART = 120
"""Most characters of a wrong value that are shown."""
_BRANCHES = {"str", "int", "float", "bool", "dict", "list", "none"}
"""Names that pydantic gives the members of a union, beside words that are not names."""


class ErrorDetail(Described):
    message: str
    """The error in words."""
    type: str
    """The class of errors, by OpenAI's or vLLM's name."""
    param: str | None
    """The field that is wrong. null: none."""
    code: str | None
    """The kind of error. null: none has a name."""


class ErrorBody(Described):
    """The shape of an error, for the description of the API."""

    error: ErrorDetail
    """The error."""


_MEANINGS = {
    400: "The request is wrong.",
    401: "The API key is wrong or missing.",
    404: "The model is not served.",
    413: "The body is too large.",
    415: "The body is compressed.",
    424: "The model does not serve this task.",
    429: "Too many requests wait, or cost too much together, or a limit of the key is met.",
    500: "The server or the model failed.",
    501: "The API has it, and this server does not.",
    502: "A render server's answer cannot be used.",
    503: "Requests are not served now.",
    504: "The request's timeout was over.",
}


Path = tuple[int | str, ...]
"""Place of a value in a body: names of fields and indices."""
_OWN = ("json_invalid", "unknown", "unsupported", "two_names")
"""Kinds of complaints that are about a body as a whole, in words of their own."""
Model = TypeVar("Model", bound=BaseModel)


def validated(kind: type[Model], fields: Mapping[str, Any]) -> Model:
    """A body from fields that are not checked yet. Raises RequestValidationError, like FastAPI
    reading a body."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(
            [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        ) from None


def described(*statuses: int, kind: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Error answers with these statuses, for the description of the API. `kind`: the shape of an
    error."""
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
        self.extra_fields: dict[str, str] = {}
        """Further fields of the response, next to `error`."""

    def response(self, types: Mapping[int, str] = MappingProxyType({})) -> JSONResponse:
        """The answer of the error. `types`: types of errors by status, in place of OpenAI's."""
        body = self.body["error"]
        error = {**body, "type": types.get(self.status, body["type"] or "")}
        return JSONResponse({**self.extra_fields, "error": error}, self.status, self.headers)


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error in the words of another API. `names`: that API's names by our fields."""
    body = error.body["error"]
    ours = body["param"]
    message = body["message"] or ""
    if ours is None or (param := names.get(ours)) is None:
        return error
    message = message.replace(ours, param)
    # Names of other wrong values.
    message = re.sub(r"(?<=')\w+", lambda name: names.get(name[0], name[0]), message)
    return ApiError(
        error.status,
        message,
        param=param,
        code=body["code"],
        headers=error.headers,
    )


def missing(field: str, where: str | None = None) -> ApiError:
    """The error of a required field that is missing. `where`: its place, if it is inside of
    `field`."""
    return ApiError(
        400,
        f"You must provide the parameter {where or field!r}.",
        param=field,
        code="missing_required_parameter",
    )


def printable(text: str, most: int = _NAME) -> str:
    """The beginning of a client's text, safe to send back. JSON may name lone surrogates, which
    UTF-8 cannot encode."""
    return (
        (text if len(text) <= most else f"{text[:most]}...")
        .encode(errors="backslashreplace")
        .decode()
    )


def as_api_error(error: Exception) -> ApiError:
    """The error that a client is told for `error`. Internal failures go to the log only."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            headers = {"Retry-After": str(math.ceil(error.retry_after))}
            return ApiError(429, str(error), code="rate_limit_exceeded", headers=headers)
        case RequestError():
            param = "prompt" if error.param == "prompt_token_ids" else error.param
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            status = getattr(error, "http_status", 400)
            code = getattr(error, "code", code)
            again = {"Retry-After": str(RETRY_AFTER)} if status == 503 else None
            return ApiError(status, str(error), param=param, code=code, headers=again)
        case RequestValidationError():
            return _validation_error(error.errors())
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


def _validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error for pydantic's complaints. A union gives one complaint for each member, and several
    places may be wrong."""
    places: dict[Path, list[Mapping[str, Any]]] = {}
    for problem in _read_farthest(problems):
        places.setdefault(_path(problem["loc"]), []).append(problem)
    # A list with a wrong item is also a wrong value for the members of a union that take no list.
    outer = {place[:end] for place in places for end in range(1, len(place))}
    wrong = [(place, same) for place, same in places.items() if place not in outer]
    errors = [_place_error(place, same) for place, same in wrong[:_PLACES]]
    first = errors[0]
    if len(wrong) == 1 or wrong[0][1][0]["type"] in _OWN:
        return first
    messages = [error.body["error"]["message"] or "" for error in errors]
    if rest := len(wrong) - len(errors):
        messages.append(f"There are {rest} more errors." if rest > 1 else "There is 1 more error.")
    body = first.body["error"]
    return ApiError(
        first.status,
        f"{len(wrong)} validation errors: {' '.join(messages)}",
        param=body["param"],
        code=body["code"],
    )


def _read_farthest(problems: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The complaints without those of a union's members that failed before others of its members
    did: only the last items of ["a", null] are wrong for a list of texts."""
    reached: dict[Path, dict[int | str, Path]] = {}
    """How far each member of a union has read."""
    members = []
    for problem in problems:
        loc = tuple(problem["loc"][1:])
        at = next((i for i in range(1, len(loc)) if _is_member(loc[i])), len(loc))
        members.append((loc[:at], loc[at] if at < len(loc) else ""))
        read = tuple(part if isinstance(part, int) else 0 for part in loc[at + 1 :])
        of_union = reached.setdefault(loc[:at], {})
        of_union[members[-1][1]] = min(read, of_union.get(members[-1][1], read))
    return [
        problem
        for problem, (union, member) in zip(problems, members, strict=True)
        if reached[union][member] == max(reached[union].values())
    ]


def _is_member(part: int | str) -> bool:
    """Whether a part of a place is pydantic's name of a union's member."""
    return isinstance(part, str) and (not part.isidentifier() or part in _BRANCHES)


def _path(loc: Sequence[int | str]) -> Path:
    """The place of a wrong value in the body. Pydantic's names of a union's members are left
    out."""
    return tuple(part for index, part in enumerate(loc[1:]) if not (index and _is_member(part)))


def _shown(value: Any) -> str:
    """A client's value, shortened for the error. It may be of any size."""
    match value:
        case list() | tuple():
            return f"<list of {len(value)} items>"
        case dict():
            return f"<dict of {len(value)} items>"
        case str() if len(value) > _PART:
            return json.dumps(f"{value[:_PART]}... [truncated]")
        case int() if abs(value) >= 10**_PART:
            return "<integer of many digits>"
        case None | bool() | int() | float() | str():
            return json.dumps(value)
        case _:
            return f"<{type(value).__name__}>"


def _place_error(path: Path, problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error of the value at `path`. An offset takes the place of the path where the body cannot
    be parsed as JSON."""
    problem = problems[0]
    field = path[0] if path and isinstance(path[0], str) else None
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    match problem["type"]:
        case "json_invalid":
            why = problem.get("ctx", {}).get("error", "it cannot be parsed")
            return ApiError(400, f"The body is not valid JSON: {why}.")
        case "unknown":
            return ApiError(400, problem["msg"], param=field or problem["ctx"]["param"])
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
        case "missing":
            return missing(field, where)
        case _:
            words = wanted(problems)
            shown = _shown(problem.get("input"))
            # A plugin's body may be checked in words of its own.
            why = problem["msg"] if words is None else f"it must be {words}, not {shown}"
            return ApiError(400, f"Invalid value for {where!r}: {why}.", param=field)
