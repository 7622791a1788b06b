"""Methods of workers that an application calls by name, with `call_workers`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec import Raw

from toolkit_lm.errors import RequestError, nearest

MAX_CALL_BYTES = 16 * 2**20
"""Most bytes, in msgpack, of a call's payload and of each answer."""

Method = TypeVar("Method", bound=Callable[..., Any])


def worker_method(method: Method) -> Method:
    """Marks a method of a StepPart or of a Model that `call_workers` may call, and no other:
    `"part.method"`, or `"model.method"`.

    It takes `self`, or `self` and one payload. The payload and the result are annotated with types
    that msgspec supports. The payload is checked against its annotation. The method is called on
    each rank that has the part, in the thread that computes steps, between two of them. An
    exception is the caller's error, and the engine continues. The method may not use the groups of
    ranks: a rank that raises would leave the others waiting. Raises TypeError for another
    signature.
    """
    parameters = list(inspect.signature(method).parameters.values())
    if len(parameters) not in (1, 2) or any(
        parameter.annotation is parameter.empty
        or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
        for parameter in parameters[1:]
    ):
        raise TypeError(
            f"{method.__qualname__} is to take self and at most one annotated payload: it is a "
            "worker_method."
        )
    vars(method)["is_worker_method"] = True
    return method


def worker_methods(targets: Mapping[str, object]) -> dict[str, Callable[..., Any]]:
    """Methods of parts and of the model that are marked as worker methods, by "name.method"."""
    return {
        f"{name}.{method}": getattr(target, method)
        for name, target in targets.items()
        for method, function in inspect.getmembers(type(target), inspect.isfunction)
        if hasattr(function, "is_worker_method")
    }


def call_method(name: str, method: Callable[..., Any], payload: Raw) -> Raw:
    """Decodes the payload, calls the method, and encodes its result. Raises RequestError for a
    payload of another type, and the method's exceptions."""
    hints = get_type_hints(method)
    parameters = inspect.signature(method).parameters
    [kind] = [hints[name] for name in parameters] or [None]
    try:
        decoded = msgspec.msgpack.decode(payload, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name}: its payload does not fit: {error}.", "payload") from error
    return encoded(method(decoded) if parameters else method(), f"the answer of {name}")


def encoded(value: object, subject: str) -> Raw:
    """Encodes `value` as msgpack. Raises RequestError for a value of a wrong type or size."""
    try:
        raw = msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"{subject} cannot be sent: {error}.", "payload") from error
    if len(raw) > MAX_CALL_BYTES:
        raise RequestError(
            f"{subject} has {len(raw)} bytes: the most is {MAX_CALL_BYTES}. Give the name of a "
            "file in its place.",
            "payload",
        )
    return Raw(raw)


def unknown_method(name: str, known: list[str]) -> RequestError:
    """Error for a method that no rank has."""
    return RequestError(
        f"no worker has the method {name!r}. {nearest(name, known, otherwise='')} "
        f"There are: {', '.join(known) or 'none'}.".replace("  ", " "),
        "method",
    )
