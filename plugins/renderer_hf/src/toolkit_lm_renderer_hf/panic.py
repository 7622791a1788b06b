"""Panics of the package tokenizers: its Rust code raises them as a BaseException that no `except
Exception` sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MODULE = "pyo3_runtime"
"""Module of PanicException, which cannot be imported."""


def is_panic(error: BaseException) -> bool:
    """Whether Rust code has panicked."""
    return type(error).__module__ == _MODULE


@contextmanager
def panics_as(make: Callable[[str], Exception]) -> Iterator[None]:
    """Raises `make(message)` where the code within panics."""
    try:
        yield
    except BaseException as error:
        if is_panic(error):
            raise make(str(error)) from error
        raise
