"""Layers around the app: CORS, and the operator's own middleware."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from toolkit_lm.errors import ConfigError

from toolkit_lm_server.options import ServerOptions

_EXPOSED = ("x-request-id", "retry-after")
"""Headers of answers that a page's scripts may read, beside those that browsers allow by
themselves."""
_PREFLIGHT = 600
"""Seconds for which a browser remembers a preflight's answer."""


def load_middleware(names: list[str]) -> list[Any]:
    """The classes and functions of these names, `module:name`. Raises ConfigError."""
    return [_load(name) for name in names]


def _load(name: str) -> Any:
    separator = ":" if ":" in name else "."
    module, _, attribute = name.rpartition(separator)
    if not module or not attribute:
        raise ConfigError(f"option 'middleware': write module:Class, not {name!r}.")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except AttributeError as error:
        raise ConfigError(
            f"option 'middleware': {name!r}: the module {module!r} has no {attribute!r}."
        ) from error
    except ModuleNotFoundError as error:
        hint = (
            ""
            if error.name != module.partition(".")[0]
            else " PYTHONPATH lists folders to look in."
        )
        raise ConfigError(
            f"option 'middleware': {name!r}: there is no module {error.name!r}.{hint}"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"option 'middleware': {name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(f"option 'middleware': {name!r} is neither a class nor a function.")
    return found


def wrapped(app: ASGIApp, options: ServerOptions) -> ASGIApp:
    """The app inside its layers: CORS outermost, then middleware in its order. Raises
    ConfigError."""
    for name, made in reversed(
        list(zip(options.middleware, load_middleware(options.middleware), strict=True))
    ):
        try:
            app = BaseHTTPMiddleware(app, made) if inspect.iscoroutinefunction(made) else made(app)
        except Exception as error:
            raise ConfigError(
                f"option 'middleware': {name!r} cannot be made: {type(error).__name__}: {error}"
            ) from error
        if not callable(app):
            raise ConfigError(f"option 'middleware': {name!r} makes no ASGI app.")
    if options.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.allowed_origins,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            allow_credentials=options.allow_credentials,
            expose_headers=_EXPOSED,
            max_age=_PREFLIGHT,
        )
    return app
