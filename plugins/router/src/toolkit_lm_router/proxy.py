"""Requests of clients: each is sent to a backend, and its answer is passed on."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable
from typing import NamedTuple

import aiohttp
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from toolkit_lm_server.caller import Caller
from toolkit_lm_server.errors import RETRY_AFTER, ApiError, as_api_error
from toolkit_lm_server.json_body import Bodies, read_body
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.request_log import REASON
from toolkit_lm_server.route import authorization, caller_of, unless_disconnected

from toolkit_lm_router.answering import Answering, BrokenError
from toolkit_lm_router.asking import Asked, read, with_fields
from toolkit_lm_router.clients import check_allowed
from toolkit_lm_router.described import KEY
from toolkit_lm_router.fairness import QueueFullError, Queues
from toolkit_lm_router.fleet import Backend, Fleet
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.policy import Choice
from toolkit_lm_router.prefilling import PARAMS, Prefill, Prefills
from toolkit_lm_router.prefixes import Hasher
from toolkit_lm_router.resuming import Stream
from toolkit_lm_router.upstream import Upstream, retry_after

PATHS = frozenset(
    (
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v1/moderations",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/embed",
        "/v1/score",
        "/v1/rerank",
        "/v2/chat",
        "/v2/embed",
        "/v2/rerank",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/inference/v1/generate",
        "/apply-template",
        "/classify",
        "/completion",
        "/detokenize",
        "/embed",
        "/embed_all",
        "/embed_sparse",
        "/generate",
        "/infill",
        "/pooling",
        "/predict",
        "/rerank",
        "/score",
        "/similarity",
        "/tokenize",
    )
)
"""Paths whose requests are routed. Others would have to go to all backends, or to the one that has
kept something."""
_TRY_AGAIN = {502, 503}
"""Statuses of a backend that cannot serve, whatever the request is."""
_MOST_QUERY = 8_192


def path_of(scope: Scope) -> str:
    """The path of a request, without the one that the router is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class _Place(NamedTuple):
    """A backend that has room for a request, and has counted it."""

    backend: Backend
    choice: Choice


class _Job:
    """One request of a client, over all backends that it is sent to."""

    def __init__(self, asked: Asked, caller: Caller, target: str) -> None:
        self.asked = asked
        self.caller = caller
        self.target = target
        self.headers: list[tuple[str, str]] = []
        self.body = asked.body
        self.fields: dict[str, object] = {}
        """Fields that the router adds to the body."""
        self.prefill: Prefill | None = None
        """The prompt, for the first backend that the request is sent to."""
        self.stream: Stream | None = None
        """The stream that can go on elsewhere."""
        self.failed: set[int] = set()
        """Numbers of the backends that have failed it."""
        self.num_retries = 0
        self.num_migrations = 0


class Proxy:
    """An ASGI app for the routed paths."""

    def __init__(
        self, options: RouterOptions, fleet: Fleet, upstream: Upstream, keys: Keys | None
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._upstream = upstream
        self.keys = keys
        self._hasher = Hasher()
        # Servers that tell of their caches make the same digests.
        self._prefixes = Hasher(KEY) if options.kv_events else self._hasher
        self._prefills = Prefills(options, fleet, upstream)
        self._most = options.server.max_body_bytes
        self._bodies = Bodies(self._most)
        self.queues: Queues[_Place] = Queues(options.max_queued_requests, options.queue_timeout)
        fleet.changed = self.queues.serve
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        caller = caller_of(request)
        path = path_of(scope)
        answering = Answering(send, path, caller.request_id)
        try:
            with self._bodies.hold() as reserve:
                self._admit(request, caller)
                body = await read_body(request, self._most, reserve)
                work = self._serve(request, path, caller, body, answering)
                await unless_disconnected(receive, work)
        except ClientDisconnect:
            return
        except Exception as error:
            api_error = as_api_error(error)
            scope[REASON] = str(api_error)
            await answering.fail(api_error, scope, receive)

    def _admit(self, request: Request, caller: Caller) -> None:
        """Raises ApiError for a request without a valid key, or that is not served now."""
        account = None
        if self.keys is not None:
            account = self.keys.find(authorization(request.headers))
            caller.key = caller.client = account.name
            caller.adapters = account.adapters
            caller.models = account.models
        elif key := authorization(request.headers):
            # Backends check it. Whoever sends it is one client, from whichever address.
            caller.client = f"key {self._hasher.digest(key.encode('latin-1')):x}"
        if self.is_draining:
            headers = {"Retry-After": str(RETRY_AFTER), "Connection": "close"}
            raise ApiError(
                503, "The router is being stopped.", code="server_stopping", headers=headers
            )
        if len(request.scope["query_string"]) > _MOST_QUERY:
            raise ApiError(400, f"The query has more than {_MOST_QUERY} bytes.")
        if account is not None:
            account.begin()

    async def _serve(
        self, request: Request, path: str, caller: Caller, body: bytes, answering: Answering
    ) -> None:
        asked = read(path, body, request.headers, self._prefixes)
        if asked.needs_state:
            raise ApiError(
                501,
                f"{asked.needs_state} names what one backend has kept, and the router does not "
                "know which. Send the whole conversation as input.",
                param=asked.needs_state,
                code="unsupported",
            )
        check_allowed(asked, caller, self._fleet)
        self._fleet.check_model(asked.model)
        query = request.scope["query_string"].decode("latin-1")
        job = _Job(asked, caller, f"{path}?{query}" if query else path)
        scheme = request.scope.get("scheme", "http")
        address = "" if request.client is None else request.client.host
        headers = request.scope["headers"]
        job.headers = self._upstream.headers(headers, caller, scheme, address)
        prefill = job.prefill = self._prefills.begin(asked, job.target, job.headers)
        try:
            while not await self._attempt(job, answering):
                pass
        finally:
            if prefill is not None:
                prefill.close()

    async def _attempt(self, job: _Job, answering: Answering) -> bool:
        """Sends a request to one backend. False: it is to be sent to another. Raises ApiError."""
        start = time.monotonic()
        backend, _ = await self._place(job)
        backend.queue_seconds += time.monotonic() - start
        try:
            await self._exchange(job, backend, answering)
        except BrokenError as broken:
            self._fleet.failed(backend, broken.reason, is_gone=broken.is_gone)
            job.failed.add(backend.number)
            self._check_next(job, backend, answering, broken)
            return False
        finally:
            self._fleet.end(backend)
        return True

    async def _place(self, job: _Job) -> _Place:
        """A backend for the request. Raises ApiError (503)."""
        asked = job.asked

        def acquire() -> _Place | None:
            found = self._fleet.choose(asked.model, asked.wanted, job.failed)
            if found is None:
                return None
            self._fleet.begin(found[0], asked.wanted, found[1])
            return _Place(*found)

        def give_back(place: _Place) -> None:
            self._fleet.end(place.backend)

        # Where all have failed it, one of them may have come back.
        if job.failed and not self._fleet.num_ready(asked.model, job.failed):
            job.failed.clear()
        try:
            return await self.queues.place(
                asked.model,
                job.caller.client,
                acquire,
                give_back,
                len(asked.body),
                is_picky=bool(job.failed),
            )
        except QueueFullError:
            raise _busy("Too many requests wait (max_queued_requests).") from None
        except TimeoutError:
            if self._fleet.num_ready(asked.model):
                reason = "No backend had room for the request (queue_timeout)."
            else:
                reason = "No backend that serves the model is ready (queue_timeout)."
            raise _busy(reason) from None

    async def _exchange(self, job: _Job, backend: Backend, answering: Answering) -> None:
        """Sends a request, and passes its answer on. Raises BrokenError, before anything or where
        the stream breaks off."""
        self._prepare(job, backend)
        # Whoever fails has the blocks: another backend computes the prompt.
        prefill, job.prefill = job.prefill, None

        def send(params: object) -> Awaitable[aiohttp.ClientResponse]:
            body = job.body if params is None else with_fields(job.body, {PARAMS: params})
            return self._upstream.send(backend, job.target, body, job.headers)

        try:
            if prefill is None:
                answer = await send(None)
            else:
                answer = await prefill.send(send, is_ours=backend.is_ours)
        except aiohttp.ClientConnectorError as error:
            raise BrokenError(str(error), is_gone=True, was_sent=False) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenError(str(error) or type(error).__name__) from error
        try:
            if answer.status in _TRY_AGAIN:
                await self._refused(job, backend, answer, answering)
            elif answer.status >= 500:
                self._fleet.failed(backend, f"the status {answer.status}", is_gone=False)
            else:
                backend.num_failures = 0
            await answering.pass_on(answer, job.stream)
        finally:
            # Closed, not released: the backend aborts what the client has left.
            answer.close()

    def _prepare(self, job: _Job, backend: Backend) -> None:
        """Makes a stream one that can go on elsewhere, if the backend is one of ours: its draws
        depend on the seed and the position alone."""
        asked = job.asked
        if job.stream is not None:
            job.stream.replay()
            if job.stream.token_ids and asked.is_single and backend.is_ours:
                job.fields["begun_token_ids"] = [*job.stream.token_ids]
            job.body = asked.with_fields(**job.fields)
        elif asked.is_resumable and backend.is_ours and self._options.migrations:
            hides_ids = asked.is_single and not asked.has_ids
            job.stream = Stream(hides_ids=hides_ids)
            if not asked.has_seed:
                job.fields["seed"] = secrets.randbits(62)
            if hides_ids:
                job.fields["return_token_ids"] = True
            job.body = asked.with_fields(**job.fields)

    async def _refused(
        self, job: _Job, backend: Backend, answer: aiohttp.ClientResponse, answering: Answering
    ) -> None:
        """A backend does not serve now: raises BrokenError where another can."""
        seconds = retry_after(answer)
        self._fleet.rest(backend, 1.0 if seconds is None else seconds)
        others = self._fleet.num_ready(job.asked.model, {*job.failed, backend.number})
        if (others and job.num_retries < self._options.retries) or answering.has_begun:
            raise BrokenError(f"the status {answer.status}", was_sent=False)

    def _check_next(
        self, job: _Job, backend: Backend, answering: Answering, broken: BrokenError
    ) -> None:
        """Counts a failure. Raises ApiError where the request is not sent again."""
        reason = f"The backend broke off: {broken.reason[:200]}."
        if not answering.has_begun:
            if job.asked.is_stored and broken.was_sent:
                why = " The request is stored, so it is not sent to another one."
                raise ApiError(502, reason + why, code="backend_failed")
            backend.num_retries += 1
            # One that cannot be reached gets no further requests: there is an end to them.
            job.num_retries += not broken.is_gone
            if job.num_retries > self._options.retries:
                raise ApiError(502, reason, code="backend_failed")
            return
        if job.stream is None or broken.is_final:
            raise ApiError(502, reason, code="backend_failed")
        job.num_migrations += 1
        if job.num_migrations > self._options.migrations:
            raise ApiError(502, reason, code="backend_failed")
        backend.num_migrations += 1


def _busy(reason: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_AFTER)}
    return ApiError(503, f"{reason} Try again later.", code="server_busy", headers=headers)
