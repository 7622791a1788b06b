"""Paths that no route has: other spellings of those that there are, and routes of OpenAI's that
this server has not."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

_VERSION = "/v1"
_MISSING = {
    "/v1/audio/speech": "no model here speaks: answers are texts",
    "/v1/audio/transcriptions": "the served model hears no recordings: serve one that does",
    "/v1/audio/translations": "the served model hears no recordings: serve one that does",
    "/v1/realtime": "there are no sessions: stream /v1/chat/completions",
    "/v1/images": "no model here makes images: answers are texts",
    "/v1/videos": "no model here makes videos: answers are texts",
    "/v1/moderations": "a model that classifies answers it: the operator names the plugin "
    "moderations (routes)",
    "/v1/files": "no files are kept: the plugin batches needs a folder (batches.folder)",
    "/v1/uploads": "files come whole: POST /v1/files, where the plugin batches has a folder",
    "/v1/batches": "no batches are kept: the plugin batches needs a folder (batches.folder)",
    "/v1/conversations": "no conversations are kept: send the whole one, or ask the operator "
    "to keep them (max_stored_responses)",
    "/v1/vector_stores": "no files are kept: ask /v1/embeddings",
    "/v1/fine_tuning": "no model is trained here",
    "/v1/assistants": "there are no assistants: ask /v1/responses",
    "/v1/threads": "there are no assistants: ask /v1/responses",
    "/v1/containers": "no code runs here",
    "/v1/evals": "there are no evaluations",
}
"""Reasons why a route of OpenAI's is missing, by the beginning of its path."""


class OtherPaths:
    """The answer to a path that no route has. A route that has it with /v1 before it, or without
    the slash at its end, answers. A redirect would send clients to whatever the Host header
    names."""

    def __init__(self, app: FastAPI) -> None:
        self._router = app.router
        self._not_found = app.router.default

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            prefix = scope.get("root_path", "")
            path = scope["path"].removeprefix(prefix)
            for other in _spellings(path):
                if self._is_known({**scope, "path": other, "root_path": ""}):
                    scope["path"] = prefix + other
                    scope["raw_path"] = scope["path"].encode()
                    await self._router(scope, receive, send)
                    return
            if (reason := _reason(path)) is not None:
                raise HTTPException(404, f"{path} is not served: {reason}.")
        await self._not_found(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is not Match.NONE for route in self._router.routes)


def _spellings(path: str) -> Iterator[str]:
    """Other spellings of a path, the likeliest first."""
    bare = path.rstrip("/")
    if bare and bare != path:
        yield bare
    if bare and not path.startswith(f"{_VERSION}/"):
        yield f"{_VERSION}{bare}"


def _reason(path: str) -> str | None:
    """Why a route of OpenAI's is missing. None for a path that is not one of them."""
    versioned = path if path.startswith(f"{_VERSION}/") else f"{_VERSION}{path}"
    beginnings = (
        reason
        for beginning, reason in _MISSING.items()
        if versioned == beginning or versioned.startswith(f"{beginning}/")
    )
    return next(beginnings, None)
