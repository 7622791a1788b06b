"""Refusals: what mistral-common raises about a request, as a RequestError that names the
parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from toolkit_lm.errors import RequestError

_MOST = 500
"""Characters of a message: those of the library may repeat all that was given."""


@contextmanager
def refusals(param: str, by_class: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raises RequestError for `param`, or for that of the error's class in `by_class`, where the
    code within fails."""
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            name = (by_class or {}).get(type(error).__name__, param)
            raise RequestError(
                f"mistral-common refuses this request: {wording(error)}", name
            ) from error
        raise


def is_panic(error: BaseException) -> bool:
    """Whether Rust code has panicked: tiktoken's raises that as a BaseException, whose class cannot
    be imported."""
    return type(error).__module__ == "pyo3_runtime"


def wording(error: BaseException) -> str:
    """Message of an error, in one line of bounded length."""
    details = getattr(error, "errors", None)
    if callable(details) and (found := details()):
        # pydantic's own text shows the input.
        where = ".".join(map(str, found[0]["loc"]))
        text = f"{where}: {found[0]['msg']}" if where else str(found[0]["msg"])
    elif isinstance(error, KeyError):
        text = f"there is no {error}"
    else:
        text = str(error) or type(error).__name__
    text = " ".join(text[: 2 * _MOST].split())
    return text if len(text) <= _MOST else f"{text[:_MOST]}..."
