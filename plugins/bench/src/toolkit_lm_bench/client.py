"""A client of servers that speak OpenAI's API, which measures each answer's stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct
from toolkit_lm.errors import ConfigError, ToolkitError
from yarl import URL

from toolkit_lm_bench.datasets import Prompt
from toolkit_lm_bench.figures import Sample
from toolkit_lm_bench.options import SamplingOptions, TargetOptions

_LONGEST_REASON = 500
"""Characters of a body that is shown as the reason of a failure."""
_ROUTES = {"completions": "v1/completions", "chat": "v1/chat/completions"}


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning or ""

    @property
    def content(self) -> str:
        """The answer without reasoning, which does not belong to a conversation's history."""
        return self.text or "" if self.delta is None else self.delta.content or ""


class _Drafted(Struct):
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    drafters: dict[str, _Drafted] = {}


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class Stream:
    """Server-sent events of one answer, as they come. Times are seconds of time.perf_counter()."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """Times of the events with text."""
        self.content: list[str] = []
        self.usage: _Usage | None = None
        self.error: str | None = None
        self.is_whole = False
        self._first_choice: float | None = None
        self._rest = b""
        self._decode = msgspec.json.Decoder(_Event).decode

    def feed(self, now: float, piece: bytes) -> None:
        """Takes a piece of the body, wherever it is cut."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read_event(now, line[len(b"data:") :].strip())

    def _read_event(self, now: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_whole = True
            return
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event is not one of OpenAI's API: {error}"
            return
        if event.error is not None:
            self.error = self.error or str(
                event.error.get("message", event.error)
                if isinstance(event.error, dict)
                else event.error
            )
        # Some servers send the usage so far with each event.
        self.usage = event.usage or self.usage
        for choice in event.choices[:1]:
            self._first_choice = self._first_choice or now
            if choice.piece:
                self.times.append(now)
                self.content.append(choice.content)
            self.is_whole = self.is_whole or choice.finish_reason is not None

    def sample(self, start: float, prompt: Prompt | None) -> Sample:
        """`prompt`: None for a conversation."""
        if self.error is not None or not self.is_whole:
            return Sample(error=self.error or "the answer broke off before its end")
        # Tokens without a text are in no event, or in one without text.
        times = self.times or [self._first_choice or start]
        usage = self.usage
        of_prompt = prompt.num_tokens if prompt else 0
        return Sample(
            ttft=times[0] - start,
            gaps=[after - before for before, after in pairwise(times)],
            e2el=times[-1] - start,
            num_prompt_tokens=usage.prompt_tokens if usage else of_prompt,
            num_output_tokens=usage.completion_tokens if usage else len(self.times),
            num_draft_tokens=usage.draft_tokens if usage else 0,
            num_accepted_tokens=usage.accepted_draft_tokens if usage else 0,
            drafters={
                name: (found.draft_tokens, found.accepted_draft_tokens)
                for name, found in (usage.drafters if usage else {}).items()
            },
            is_counted=usage is None,
            text="".join(self.content),
        )


def _vocab_size(card: dict[str, Any]) -> int | None:
    """Vocabulary size in the description of a model, ours or llama.cpp's; None: unknown."""
    meta = card.get("meta")
    found = card.get("vocab_size") or (meta.get("n_vocab") if isinstance(meta, dict) else None)
    return found if isinstance(found, int) and found > 0 else None


def parse_address(url: str) -> URL:
    """The address of a server, up to what comes before /v1. Raises ConfigError."""
    try:
        address = URL(url)
    except ValueError:
        address = URL()
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(
            f"option 'url': {url!r} is not the address of a server, such as http://127.0.0.1:8000."
        )
    return address.origin().with_path(address.path.rstrip("/").removesuffix("/v1"))


class Client:
    """Asks one server. `model`: None for the first one that it serves, which `connect` finds."""

    def __init__(
        self, target: TargetOptions, sampling: SamplingOptions, model: str | None, endpoint: str
    ) -> None:
        self.model = model
        self.vocab_size: int | None = None
        """Number of the model's tokens, once `connect` has asked. None where no server says it."""
        self._address = parse_address(target.url)
        self._target = target
        self._route = _ROUTES[endpoint]
        self._sampling: dict[str, Any] = (
            {} if sampling.temperature is None else {"temperature": sampling.temperature}
        )
        if sampling.ignore_eos:
            self._sampling["ignore_eos"] = True
        key = target.api_key or ""
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                "option 'api_key' must be printable ASCII characters: others do not fit in a "
                "header."
            )
        self._headers = {"content-type": "application/json"} | (
            {"authorization": f"Bearer {key}"} if key else {}
        )
        self._session: aiohttp.ClientSession

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[None]:
        """Finds the model, and keeps connections. Raises ToolkitError where no server answers, or
        another one."""
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        async with aiohttp.ClientSession(
            # The number of connections is not limited.
            connector=aiohttp.TCPConnector(limit=0),
            headers=self._headers,
            # A compressed response does not arrive event by event.
            skip_auto_headers=["Accept-Encoding"],
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(),
            trace_configs=[trace],
        ) as self._session:
            await self._find_model()
            yield

    async def complete(self, prompt: Prompt) -> Sample:
        """Sends a prompt, as it is or as a user's message."""
        if self._route == _ROUTES["completions"]:
            return await self._measure({"prompt": prompt.content}, prompt.max_tokens, prompt)
        return await self.chat([{"role": "user", "content": prompt.text}], prompt.max_tokens)

    async def chat(self, messages: list[dict[str, Any]], max_tokens: int) -> Sample:
        """Sends a conversation."""
        return await self._measure({"messages": messages}, max_tokens, None)

    async def _find_model(self) -> None:
        where = f"the server at {self._target.url}"
        try:
            async with self._ask("GET", "v1/models") as reply:
                status = reply.status
                body = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ToolkitError(f"no answer from {where}: {self._reason_of(error)}") from error
        if status != 200 and self.model is None:
            raise ToolkitError(
                f"{where} does not list its models ({status}): {_refusal(body)}. Name one with "
                "--model."
            )
        try:
            cards = {str(card["id"]): card for card in json.loads(body)["data"]}
            self.model = self.model or next(iter(cards))
            self.vocab_size = _vocab_size(cards.get(self.model, {}))
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            if self.model is not None:
                return
            message = (
                f"{where} does not speak OpenAI's API: /v1/models gives no list of models. Name "
                "one with --model."
            )
            raise ToolkitError(message) from error

    async def _measure(
        self, question: dict[str, Any], max_tokens: int, prompt: Prompt | None
    ) -> Sample:
        """Failures are samples, too."""
        asked = {
            "model": self.model,
            **question,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked | self._sampling).encode()
        stream = Stream()
        start = time.perf_counter()
        try:
            async with self._ask("POST", self._route, body) as reply:
                if reply.status != 200:
                    return Sample(error=f"{reply.status}: {_refusal(await reply.read())}")
                if not (kind := reply.headers.get("Content-Type", "of no type")).startswith(
                    "text/event-stream"
                ):
                    return Sample(error=f"the server does not stream: its answer is {kind}")
                async for piece in reply.content.iter_any():
                    stream.feed(time.perf_counter(), piece)
        except (aiohttp.ClientError, OSError) as error:
            return Sample(error=self._reason_of(error))
        return stream.sample(start, prompt)

    @asynccontextmanager
    async def _ask(
        self, method: str, route: str, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises aiohttp.ClientError, OSError."""
        async with (
            asyncio.timeout(self._target.timeout),
            await self._begin(method, route, body) as reply,
        ):
            yield reply

    async def _begin(self, method: str, route: str, body: bytes | None) -> aiohttp.ClientResponse:
        while True:
            reused: list[bool] = []
            try:
                return await self._session.request(
                    method,
                    self._address / route,
                    data=body,
                    allow_redirects=False,
                    trace_request_ctx=reused,
                )
            except aiohttp.ClientConnectionError:
                # The server may have closed an idle connection at the moment at which it was taken.
                if not reused:
                    raise

    def _reason_of(self, error: aiohttp.ClientError | OSError) -> str:
        match error:
            case aiohttp.ClientConnectorError():
                return str(error.__cause__)
            case aiohttp.ClientResponseError():
                return "the server's answer is not HTTP/1.1"
            case aiohttp.ClientConnectionError() | aiohttp.ClientPayloadError():
                return "the server hung up"
        # The error of asyncio.timeout has no text, that of a socket has one.
        return str(error) or (
            f"no end after {self._target.timeout:g} s"
            if isinstance(error, TimeoutError)
            else type(error).__name__
        )


async def _note_reuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.append(True)


def _refusal(body: bytes) -> str:
    """The message of an error's body; bodies of other forms as they are."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError, AttributeError):
        return body[:_LONGEST_REASON].decode(errors="replace") or "no reason given"
