"""The route class of the server: what holds for each route, in whichever app it is mounted."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from llm_toolkit_server.disconnect import unless_disconnected
from llm_toolkit_server.errors import ApiError, as_api_error
from llm_toolkit_server.options import ServerOptions


class ServerRoute(APIRoute):
    """Checks the API key, bounds the body, ends the work when the client disconnects, and words errors as OpenAI does.

    `route_class(options)` makes the subclass to use.
    """

    options: ServerOptions

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def respond(request: Request) -> Response:
            try:
                check_key(request, self.options.api_key)
                body = await read_body(request, self.options.max_body_bytes)
                return await unless_disconnected(request.receive, handle(Request(request.scope, _replay(body))))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return as_api_error(error).response()

        return respond


def route_class(options: ServerOptions) -> type[ServerRoute]:
    """The route class of a server with these options."""
    return type("ServerRoute", (ServerRoute,), {"options": options})


def check_key(request: Request, api_key: str | None) -> None:
    """Raises ApiError (401) unless the request brings the key, where there is one."""
    if api_key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), api_key.encode()):
        headers = {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, "Incorrect API key provided: send it as 'Authorization: Bearer KEY'.", code="invalid_api_key", headers=headers)


async def read_body(request: Request, most: int) -> bytes:
    """The body. Raises ApiError (413) as soon as it is seen to be larger than `most` bytes, ClientDisconnect when it breaks off."""
    too_large = ApiError(413, f"The body is larger than {most} bytes (max_body_size).", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise too_large
    body, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > most:
            raise too_large
        more = message.get("more_body", False)
    return bytes(body)


def _replay(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
