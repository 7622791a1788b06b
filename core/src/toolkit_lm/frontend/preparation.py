"""Preparation: awaitable conversion of prompts and conversations to requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.processor import Processor, text_of
from toolkit_lm.processing.requests import PreparedRequest, RenderedPrompt, RequestOptions
from toolkit_lm.prompts import Conversation, Prompt
from toolkit_lm.renderer import Rendered, Renderer

Result = TypeVar("Result")
Render = Callable[..., Rendered]
Prepare = Callable[..., Awaitable[list[PreparedRequest]]]
RenderAsync = Callable[..., Awaitable[Rendered]]
_SIDE_BY_SIDE = 16
"""Most coroutines of a batch that run at a time. Each may hold a body of its prompt's size."""


class Preparation:
    """A Processor for event loops. Work is done in threads. No thread waits for a renderer that can
    be awaited."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._renderer = processor.renderer
        kind = type(processor.renderer)
        own = kind.render_prompt_async, kind.render_conversation_async
        usual = Renderer.render_prompt_async, Renderer.render_conversation_async
        self.is_one_piece = processor.reads_pairs or own == usual
        """The renderer has no async methods of its own: one thread does all the work."""
        self.prepare_batch: Prepare = self._prepare_batch
        """Awaitable `Processor.prepare_batch`."""
        self.prepare_chat_batch: Prepare = self._prepare_chat_batch
        """Awaitable `Processor.prepare_chat_batch`."""
        if self.is_one_piece:
            in_thread: Prepare = asyncio.to_thread
            self.prepare_batch = partial(in_thread, processor.prepare_batch)
            self.prepare_chat_batch = partial(in_thread, processor.prepare_chat_batch)

    async def _prepare_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: SamplingParams | None,
        options: RequestOptions | None,
    ) -> list[PreparedRequest]:
        salt = (options or {}).get("cache_salt")
        both = (self._renderer.render_prompt_async, self._renderer.render_prompt)
        rendered = (self._rendered(*both, prompt, text_of(prompt), salt) for prompt in prompts)
        return await self._prepared(request_ids, rendered, params, options or {})

    async def _prepare_chat_batch(
        self,
        request_ids: Sequence[str],
        conversations: Sequence[Conversation],
        params: SamplingParams | None,
        options: RequestOptions | None,
        **render_options: Any,
    ) -> list[PreparedRequest]:
        salt = (options or {}).get("cache_salt")
        both = (self._renderer.render_conversation_async, self._renderer.render_conversation)
        rendered = (
            self._rendered(*both, conversation, None, salt, **render_options)
            for conversation in conversations
        )
        return await self._prepared(request_ids, rendered, params, options or {})

    async def _rendered(
        self,
        render: RenderAsync,
        again: Render,
        source: Any,
        text: str | None,
        salt: str | None,
        **render_options: Any,
    ) -> RenderedPrompt:
        """Renders a prompt. `again`: synchronous variant of `render`, for data that the engine has
        lost."""
        rendering = self._processor.rendering(again, source, salt, **render_options)
        try:
            return self._processor.rendered_by(
                rendering, await rendering.awaited(render(source, **render_options)), text
            )
        except Exception as error:
            self._processor.plugins.boundary.check(error)
            raise

    async def _prepared(
        self,
        request_ids: Sequence[str],
        rendered: Iterable[Coroutine[Any, Any, RenderedPrompt]],
        params: SamplingParams | None,
        options: RequestOptions,
    ) -> list[PreparedRequest]:
        params = copy(params or self._processor.default_params)
        # Errors of the parameters are raised before anything is rendered.
        inputs = await asyncio.to_thread(self._processor.inputs, params)
        made = await side_by_side(rendered)
        return await asyncio.to_thread(
            self._processor.prepare_rendered, request_ids, made, params, inputs, options
        )


async def side_by_side(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs coroutines, at most 16 at a time, and returns their results in order. Raises the error
    of the first that fails. None of them is still running at the end."""
    places, works = asyncio.Semaphore(_SIDE_BY_SIDE), list(works)

    async def placed(work: Coroutine[Any, Any, Result]) -> Result:
        async with places:
            return await work

    tasks = [asyncio.ensure_future(placed(work)) for work in works]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for work in works:
            # Coroutines that have not begun.
            work.close()
