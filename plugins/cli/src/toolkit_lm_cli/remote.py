"""A model on a server that speaks OpenAI's HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import httpx
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError, ToolkitError

from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_cli.screen import Thought
from toolkit_lm_cli.talker import Usage

_TIMEOUT = httpx.Timeout(600, connect=10)


class RemoteTalker:
    """Asks a server, and reads its answer as server-sent events. `model`: None for the first one
    that it serves."""

    usage: Usage | None = None

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT)
        try:
            self._model = model or self._first_model()
        except BaseException:
            # Nobody else can: the server may keep the connection.
            self._client.close()
            raise

    def facts(self) -> Mapping[str, str]:
        most = self.max_model_len()
        return (
            {"model": self._model}
            | ({"context": f"{most:,} tokens of context"} if most else {})
            | {"server": self._url}
        )

    @cache  # noqa: B019  (a command has one)
    def max_model_len(self) -> int | None:
        # Not all servers tell.
        with suppress(httpx.HTTPError, ValueError, LookupError, TypeError):
            cards = self._client.get(f"{self._url}/v1/models").json()["data"]
            return int(next(card["max_model_len"] for card in cards if card["id"] == self._model))
        return None

    def chat(self, messages: list[dict[str, Any]], flags: SamplingFlags) -> Iterator[str]:
        for choice in self._choices("/v1/chat/completions", {"messages": messages, **flags}):
            delta = choice.get("delta", {})
            # Servers call it by either name.
            if thought := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Thought(thought)
            yield delta.get("content") or ""

    def complete(self, prompt: str, flags: SamplingFlags) -> Iterator[str]:
        for choice in self._choices("/v1/completions", {"prompt": prompt, **flags}):
            yield choice.get("text") or ""

    def close(self) -> None:
        self._client.close()

    def _first_model(self) -> str:
        try:
            response = self._client.get(f"{self._url}/v1/models")
            _check(response)
            return str(response.json()["data"][0]["id"])
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                f"option 'url': {self._url!r} is not the address of a server: {error}"
            ) from error
        except httpx.HTTPError as error:
            raise ToolkitError(f"no answer from the server at {self._url}: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ToolkitError(
                f"the server at {self._url} does not speak OpenAI's API: /v1/models gives no "
                "list of models."
            ) from error

    def _choices(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        body = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        self.usage = None
        try:
            with self._client.stream("POST", self._url + path, json=body) as response:
                if response.is_error:
                    response.read()
                _check(response)
                for event in _events(response.iter_lines()):
                    self.usage = _usage(event) or self.usage
                    yield from (event.get("choices") or [])[:1]
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ConfigError(
                f"option 'url': {self._url!r} is not the address of a server: {error}"
            ) from error
        except httpx.HTTPError as error:
            raise ToolkitError(f"the server at {self._url} went away: {error}") from error


def _usage(event: Mapping[str, Any]) -> Usage | None:
    """Usage in the last event, if the server reports it."""
    with suppress(LookupError, TypeError):
        return Usage(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
    return None


def _check(response: httpx.Response) -> None:
    if not response.is_error:
        return
    code = None
    try:
        reason = response.json()["error"]["message"]
        code = response.json()["error"].get("code")
    except (ValueError, LookupError, TypeError):
        reason = response.text[:500]
    kind: type[ToolkitError] = (
        RequestError if response.status_code in (400, 404, 422) else ToolkitError
    )
    if code == "context_length_exceeded":
        kind = ContextLengthError
    raise kind(f"the server refused the request ({response.status_code}): {reason}")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, up to "[DONE]"."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[len("data:") :].strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestError(
                f"the server failed on the request: {event['error'].get('message', event['error'])}"
            )
        yield event
    raise ToolkitError("the server's answer broke off before its end.")
