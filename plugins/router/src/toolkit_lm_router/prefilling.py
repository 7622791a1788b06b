"""Prefill apart: a backend of its own computes a prompt, and the one that answers fetches its KV
blocks."""

from __future__ import annotations

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
    PARAMS: {"do_remote_decode": True, "do_remote_prefill": False},
}
"""Fields of a request that only computes its prompt, as vLLM's routers send them."""
_OF_PATHS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"max_completion_tokens": 1, "store": False},
    "/v1/completions": {"best_of": None},
}


class _Answer(Struct):
    kv_transfer_params: Raw | UnsetType = UNSET


class Prefills:
    """Sends long prompts to backends with the role prefill. Whatever fails there, the backend that
    answers computes the prompt itself."""

    def __init__(self, options: RouterOptions, fleet: Fleet, upstream: Upstream) -> None:
        self._least = options.prefill_min_bytes
        self._fleet = fleet
        self._upstream = upstream

    async def begin(self, asked: Asked, target: str, headers: list[tuple[str, str]]) -> Raw | None:
        """Has a prompt computed. Returns the params by which its blocks are fetched; None: there
        are none."""
        if not asked.is_completion or len(asked.body) < self._least or not asked.is_object:
            return None
        # The session's home is a backend that answers.
        wanted = replace(asked.wanted, session="")
        found = self._fleet.choose(asked.model, wanted, role="prefill")
        if found is None:
            return None
        backend, choice = found
        self._fleet.begin(backend, wanted, choice)
        try:
            return await self._ask(backend, asked, target, headers)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            gone = isinstance(error, aiohttp.ClientConnectorError)
            self._fleet.failed(backend, reason, is_gone=gone)
        finally:
            self._fleet.end(backend)
        backend.num_retries += 1
        return None

    async def _ask(
        self, backend: Backend, asked: Asked, target: str, headers: list[tuple[str, str]]
    ) -> Raw | None:
        """Raises aiohttp.ClientError, OSError and TimeoutError."""
        body = asked.with_fields(**_ONE_TOKEN, **_OF_PATHS[asked.path])
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
            params = msgspec.json.decode(text, type=_Answer).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if isinstance(params, UnsetType) or bytes(params) == b"null":
            return None
        return params
