"""The static files of the server's pages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import PurePath
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

PAGE = (
    "app.js",
    "attachments.js",
    "branches.js",
    "calls.js",
    "charts.js",
    "chat.js",
    "code.js",
    "conversations.js",
    "dom.js",
    "exchange.js",
    "format.js",
    "icon.svg",
    "icons.js",
    "inline.js",
    "live.js",
    "markdown.js",
    "math.js",
    "models.js",
    "pool.js",
    "request.js",
    "settings.js",
    "store.js",
    "style.css",
    "turns.js",
)
_API = ("docs.js", "dom.js", "icon.svg", "icons.js", "style.css")
_KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# They load what they need from this server, and nothing from elsewhere; no text of a model becomes
# code.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_files(
    routes: APIRouter | FastAPI, page: tuple[str, str], folder: str, names: Iterable[str]
) -> None:
    """Serves a page, (path, file), and the files of a folder beside it, without an API key."""
    path, file = page
    for at, name in ((path, file), *((f"{folder}/{name}", name) for name in names)):
        router = routes.router if isinstance(routes, FastAPI) else routes
        router.add_api_route(
            at,
            _sender(name),
            methods=["GET", "HEAD"],
            response_model=None,
            include_in_schema=False,
            route_class_override=APIRoute,
        )


def add_api_page(app: FastAPI) -> None:
    """Serves the description of the app's routes at /docs. FastAPI's own page would load its script
    from another host."""
    add_files(app, ("/docs", "docs.html"), "/docs", _API)


def _sender(name: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    data = (files("toolkit_lm_server.ui") / "static" / name).read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": tag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=_KINDS[PurePath(name).suffix], headers=headers)

    return send
