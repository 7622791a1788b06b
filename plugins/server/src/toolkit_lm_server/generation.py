"""One HTTP request's work in the engine: each prompt a request, its outputs taken apart into what is new."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.outputs import CompletionOutput, Logprob, RequestOutput
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import TokensPrompt

from toolkit_lm_server.errors import ApiError

if TYPE_CHECKING:
    from toolkit_lm.frontend import AsyncLLM, RequestOptions


@dataclass(slots=True)
class Piece:
    """A part of one choice: what is new in it, or the whole of it."""

    index: int
    """Of the choice: n choices per prompt, prompt by prompt."""
    text: str
    text_offset: int = 0
    """Characters of the choice before this text."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """One per token, where asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generation:
    """The engine's work on some prompts. `start` makes one; take its `deltas` or its `choices`; `usage` is final after that."""

    def __init__(
        self, first: tuple[int, RequestOutput], rest: AsyncGenerator[tuple[int, RequestOutput], None], prompts: list[list[int]], n: int
    ) -> None:
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self._first = first
        self._rest = rest
        self._prompts = prompts
        self._n = n
        self._latest: dict[int, RequestOutput] = {}
        self._seen = [CompletionOutput(index, "", []) for index in range(len(prompts) * n)]

    @classmethod
    async def start(cls, engine: AsyncLLM, prompts: list[list[int]], params: SamplingParams, options: RequestOptions) -> Generation:
        """Waits for the first output, so that a bad request raises here (RequestError), before an answer has begun.

        `options`: those of AsyncLLM.generate.
        """
        check_priority(engine, options)
        for token_ids in prompts:
            check_length(engine, token_ids)
        streams = [engine.generate(TokensPrompt(prompt_token_ids=token_ids), params, **options) for token_ids in prompts]
        outputs = merge(streams)
        try:
            first = await anext(outputs)
            _check_time(first[1].outputs)
        except BaseException:
            await outputs.aclose()
            raise
        return cls(first, outputs, prompts, params.n)

    async def aclose(self) -> None:
        """Aborts what is not finished."""
        await self._rest.aclose()

    def prompt_logprobs(self, choice: int) -> list[dict[int, Logprob] | None] | None:
        """Those of a choice's prompt, whole once the choice has a token; None where nobody asked."""
        latest = self._latest.get(choice // self._n)
        return None if latest is None else latest.prompt_logprobs

    def prompt(self, choice: int) -> list[int]:
        """The token ids of a choice's prompt."""
        return self._prompts[choice // self._n]

    async def deltas(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, as it comes. Raises ApiError (500) when the model fails on a sequence."""
        yield self._news(*self._first)
        async for number, output in self._rest:
            yield self._news(number, output)

    async def choices(self) -> list[Piece]:
        """Every choice at its end, in order. Aborts the requests when it is cancelled."""
        async with aclosing(self):
            async for _ in self.deltas():
                pass
        _check_time(self._seen)
        return [_since(CompletionOutput(index, "", []), choice, index) for index, choice in enumerate(self._seen)]

    def usage(self) -> dict[str, Any]:
        """Token counts, so far."""
        prompt = sum(map(len, self._prompts))
        completion = sum(len(choice.token_ids) for choice in self._seen)
        cached = sum(output.num_cached_tokens for output in self._latest.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _news(self, number: int, output: RequestOutput) -> list[Piece]:
        self._latest[number] = output
        if any(one.finish_reason == "error" for one in output.outputs):
            raise ApiError(500, f"The model failed on this request: {output.error}.", code="model_error")
        pieces = []
        for new in output.outputs:
            index = number * self._n + new.index
            old, self._seen[index] = self._seen[index], new
            piece = _since(old, new, index)
            if not old.finished and (piece.text or piece.token_ids or piece.finish_reason):
                pieces.append(piece)
        return pieces


def _since(old: CompletionOutput, new: CompletionOutput, index: int) -> Piece:
    num_old = len(old.token_ids)
    return Piece(
        index=index,
        text=new.text[len(old.text) :],
        text_offset=len(old.text),
        token_ids=new.token_ids[num_old:],
        logprobs=(new.logprobs or [])[num_old:],
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
    )


def _check_time(choices: Iterable[CompletionOutput]) -> None:
    """Raises ApiError (504) where the time was over before there was any token; a partial answer is an answer."""
    if all(choice.finish_reason == "timeout" and not choice.token_ids for choice in choices):
        raise ApiError(504, "The request's timeout was over before a token was generated.", code="timeout")


def check_length(engine: AsyncLLM, token_ids: Sequence[int]) -> None:
    """Raises ContextLengthError where no token of output fits after these."""
    most = engine.config.max_model_len
    if len(token_ids) >= most:
        raise ContextLengthError(
            f"This model's maximum context length is {most} tokens, output included. However, your prompt has {len(token_ids)} tokens.",
            "prompt",
        )


def check_model(engine: AsyncLLM, name: str | None) -> None:
    """Raises ApiError (404) for a model that is not served."""
    served = engine.config.served_model_name
    if name is not None and name != served:
        raise ApiError(404, f"The model {name!r} does not exist. This server has {served!r}.", param="model", code="model_not_found")


def check_generates(engine: AsyncLLM) -> None:
    """Raises RequestError for a model that only pools."""
    if "generate" not in engine.tasks:
        raise RequestError(f"this model generates no text. Supported: {', '.join(engine.tasks)}.", "task")


def check_priority(engine: AsyncLLM, options: RequestOptions) -> None:
    """Raises RequestError for a priority that nobody would look at."""
    if options.get("priority") and engine.config.scheduler.scheduling_policy != "priority":
        raise RequestError("priority has no effect here: the server runs without --scheduling-policy priority.", "priority")


async def merge(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The items of all streams as they come, each with its stream's number. Closing it closes them all, and so does an error in one."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    pending = {_next(generator): number for number, generator in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # Errors first: a bad prompt is refused with a status, where the answer has not begun.
            for task in sorted(done, key=lambda task: task.exception() is None):
                number = pending.pop(task)
                if (item := task.result()) is not None:
                    yield number, item
                    pending[_next(streams[number])] = number
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for generator in streams:
            await generator.aclose()


def _next(generator: AsyncGenerator[RequestOutput, None]) -> asyncio.Future[RequestOutput | None]:
    return asyncio.ensure_future(_item(generator))


async def _item(generator: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(generator, None)
