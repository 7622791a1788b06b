"""Prefill apart: a backend of its own computes a prompt, and the one that answers fetches its KV
blocks: while they are computed, if both are ours."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp
import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from toolkit_lm_router.asking import Asked
from toolkit_lm_router.fleet import Backend, Fleet
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.upstream import Upstream

PARAMS = "kv_transfer_params"
_MOST_BYTES = 16 * 2**20
"""Most bytes of the answer of a prefill."""
_ONE_TOKEN: dict[str, object] = {
    "max_tokens": 1,
    "min_tokens": 0,
    "n": 1,
    "stream": False,
    "stream_options": None,
}
"""Fields of a request that only computes its prompt, as vLLM's routers send them."""
_OF_PATHS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"max_completion_tokens": 1, "store": False},
    "/v1/completions": {"best_of": None},
}


class _Answer(Struct):
    kv_transfer_params: Raw | UnsetType = UNSET


class Prefill:
    """The prompt of a request, which a backend computes."""

    def __init__(self, asking: asyncio.Task[Raw | None], name: str | None) -> None:
        """`asking`: its result are the params by which the blocks are fetched. None: there are
        none. `name`: that of the transfer; None: blocks are fetched afterwards alone."""
        self._asking = asking
        self._name = name

    async def send(
        self,
        send: Callable[[object], Awaitable[aiohttp.ClientResponse]],
        *,
        is_ours: bool,
    ) -> aiohttp.ClientResponse:
        """Sends the request by a function of the params, None for a request without. `is_ours`: it
        goes to a server of toolkit-lm."""
        if self._name is None or not is_ours or self._asking.done():
            return await send(await self._asking)
        params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": self._name}
        sending = asyncio.ensure_future(send(params))
        try:
            await asyncio.wait({sending, self._asking}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() or self._asking.result() is not None:
                return await sending
        except asyncio.CancelledError:
            _give_up(sending)
            raise
        # Nobody computes the prompt, and the backend would wait for it.
        _give_up(sending)
        return await send(None)

    def close(self) -> None:
        """The request has ended."""
        self._asking.cancel()


def _give_up(sending: asyncio.Future[aiohttp.ClientResponse]) -> None:
    """Closes the connection of a request, which its backend then aborts."""

    def close(sent: asyncio.Future[aiohttp.ClientResponse]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            sent.result().close()

    sending.add_done_callback(close)
    sending.cancel()


class Prefills:
    """Sends long prompts to backends with the role prefill. Whatever fails there, the backend that
    answers computes the prompt itself."""

    def __init__(self, options: RouterOptions, fleet: Fleet, upstream: Upstream) -> None:
        self._least = options.prefill_min_bytes
        self._fleet = fleet
        self._upstream = upstream

    def begin(self, asked: Asked, target: str, headers: list[tuple[str, str]]) -> Prefill | None:
        """Has a prompt computed. None: the backend that answers is to do so."""
        if not asked.is_completion or len(asked.body) < self._least or not asked.is_object:
            return None
        # The session's home is a backend that answers.
        wanted = replace(asked.wanted, session="")
        found = self._fleet.choose(asked.model, wanted, role="prefill")
        if found is None:
            return None
        backend, choice = found
        self._fleet.begin(backend, wanted, choice)
        name = secrets.token_hex(16) if backend.is_ours else None
        asking = asyncio.create_task(self._compute(backend, asked, target, headers, name))
        # A task that is cancelled before it begins runs nothing of its own.
        asking.add_done_callback(lambda _: self._fleet.end(backend))
        return Prefill(asking, name)

    async def _compute(
        self,
        backend: Backend,
        asked: Asked,
        target: str,
        headers: list[tuple[str, str]],
        name: str | None,
    ) -> Raw | None:
        """Returns the params by which the blocks of a prompt are fetched; None: there are none."""
        params: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
        if name is not None:
            params |= {"transfer_id": name}
        try:
            return await self._ask(backend, asked, target, headers, params)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            gone = isinstance(error, aiohttp.ClientConnectorError)
            self._fleet.failed(backend, reason, is_gone=gone)
        backend.num_retries += 1
        return None

    async def _ask(
        self,
        backend: Backend,
        asked: Asked,
        target: str,
        headers: list[tuple[str, str]],
        params: object,
    ) -> Raw | None:
        """Raises aiohttp.ClientError, OSError and TimeoutError."""
        body = asked.with_fields(**_ONE_TOKEN, **_OF_PATHS[asked.path], **{PARAMS: params})
        answer = await self._upstream.send(backend, target, body, headers)
        try:
            text = await answer.content.read(_MOST_BYTES)
            while more := await answer.content.read(_MOST_BYTES):
                text += more
                if len(text) > _MOST_BYTES:
                    raise aiohttp.ClientPayloadError("the answer of the prefill is too large")
        finally:
            answer.close()
        if answer.status >= 500:
            raise aiohttp.ClientPayloadError(f"the status {answer.status}")
        backend.num_failures = 0
        # A request that is refused here is refused by the one that answers, too, with a reason.
        if answer.status != 200:
            return None
        try:
            found = msgspec.json.decode(text, type=_Answer).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if isinstance(found, UnsetType) or bytes(found) == b"null":
            return None
        return found
