"""Applications' calls of worker methods."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from toolkit_lm.engine.client import EngineClient
from toolkit_lm.errors import RequestError
from toolkit_lm.step.calls import encoded

Answer = TypeVar("Answer")


def call_workers(
    client: EngineClient, method: str, payload: object, answer: type[Answer] | None
) -> Future[list[Answer]]:
    """Calls a method of every worker. Raises RequestError for a payload that cannot be sent. The
    future has any other error."""
    raw = encoded(payload, f"the payload of {method}")
    decoded: Future[list[Answer]] = Future()
    decoded.set_running_or_notify_cancel()

    def decode(called: Future[list[Raw]]) -> None:
        try:
            decoded.set_result([_decoded(call, method, answer) for call in called.result()])
        except Exception as error:
            decoded.set_exception(error)

    client.call_workers(method, raw).add_done_callback(decode)
    return decoded


def _decoded(raw: Raw, method: str, answer: type[Answer] | None) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=Any if answer is None else answer)
    except msgspec.ValidationError as error:
        raise RequestError(f"{method}: its answer does not fit: {error}.", "answer") from error


def pass_on(source: Future[Answer], target: Future[Answer]) -> None:
    """Ends `target` as `source` ends, unless `target` was cancelled."""

    def ended(source: Future[Answer]) -> None:
        if target.set_running_or_notify_cancel():
            if (error := source.exception()) is None:
                target.set_result(source.result())
            else:
                target.set_exception(error)

    source.add_done_callback(ended)
