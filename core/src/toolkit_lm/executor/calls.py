"""Calls of a worker's methods, and the answers of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Raw, Struct

from toolkit_lm.executor.failure import Failure
from toolkit_lm.step.calls import call_method, unknown_method, worker_methods

if TYPE_CHECKING:
    from toolkit_lm.runner import ModelRunner


class WorkerAnswer(Struct, frozen=True, omit_defaults=True):
    """Answer of a rank to a call: a value, a failure, or the methods that it has if it lacks the
    called one."""

    values: list[Raw] = []
    """The returned value, in msgpack; empty if the rank lacks the method."""
    failure: Failure | None = None
    known: list[str] = []


def call_worker(runner: ModelRunner, method: str, payload: Raw) -> WorkerAnswer:
    """Calls a method of a rank's parts or model, by name. The answer has any exception."""
    methods = worker_methods({**runner.parts.by_name, "model": runner.model})
    if method not in methods:
        return WorkerAnswer(known=sorted(methods))
    try:
        return WorkerAnswer([call_method(method, methods[method], payload)])
    except (Exception, SystemExit) as error:
        return WorkerAnswer(failure=Failure.of(error, runner.plugins.failure))


def values_of(method: str, answers: Sequence[WorkerAnswer]) -> list[Raw]:
    """Values of the ranks that have the method, in their order. Raises the first rank's exception,
    and RequestError if no rank has the method."""
    for rank, answer in enumerate(answers):
        if answer.failure is not None:
            raise answer.failure.error(f"{method} on rank {rank}")
    values = [value for answer in answers for value in answer.values]
    if not values:
        raise unknown_method(method, sorted({name for answer in answers for name in answer.known}))
    return values
