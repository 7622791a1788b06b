"""Preparation: prompts and conversations become requests, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar

from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.processor import Processor, text_of
from toolkit_lm.processing.requests import PreparedRequest, RenderedPrompt, RequestOptions
from toolkit_lm.prompts import Conversation, Prompt
from toolkit_lm.renderer import Rendered, Renderer

Result = TypeVar("Result")
Render = Callable[..., Rendered]
RenderAsync = Callable[..., Awaitable[Rendered]]
_SIDE_BY_SIDE = 16
"""Of the works of a batch, how many have begun and are not over. Each may hold a body of its
prompt's size."""


class Preparation:
    """A Processor for event loops. Work is done in threads, and none of them waits for a renderer
    that can be awaited."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._renderer = processor.renderer
        kind = type(processor.renderer)
        own = kind.render_prompt_async, kind.render_conversation_async
        usual = Renderer.render_prompt_async, Renderer.render_conversation_async
        self.is_one_piece = processor.reads_pairs or own == usual
        """The renderer has no async methods of its own: all the work is for one thread."""

    async def prepare_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: SamplingParams | None,
        options: RequestOptions | None,
    ) -> list[PreparedRequest]:
        """As the Processor's."""
        if self.is_one_piece:
            return await asyncio.to_thread(
                self._processor.prepare_batch, request_ids, prompts, params, options
            )
        salt = (options or {}).get("cache_salt")
        both = (self._renderer.render_prompt_async, self._renderer.render_prompt)
        rendered = (self._rendered(*both, one, text_of(one), salt) for one in prompts)
        return await self._prepared(request_ids, rendered, params, options or {})

    async def prepare_chat_batch(
        self,
        request_ids: Sequence[str],
        conversations: Sequence[Conversation],
        params: SamplingParams | None,
        options: RequestOptions | None,
        **render_options: Any,
    ) -> list[PreparedRequest]:
        """As the Processor's."""
        if self.is_one_piece:
            prepare = self._processor.prepare_chat_batch
            return await asyncio.to_thread(
                prepare, request_ids, conversations, params, options, **render_options
            )
        salt = (options or {}).get("cache_salt")
        both = (self._renderer.render_conversation_async, self._renderer.render_conversation)
        rendered = (
            self._rendered(*both, one, None, salt, **render_options) for one in conversations
        )
        return await self._prepared(request_ids, rendered, params, options or {})

    async def _rendered(
        self,
        render: RenderAsync,
        again: Render,
        given: Any,
        text: str | None,
        salt: str | None,
        **render_options: Any,
    ) -> RenderedPrompt:
        """`again`: as `render`, for data that the engine has lost."""
        rendering = self._processor.rendering(again, given, salt, **render_options)
        try:
            return self._processor.rendered_by(
                rendering, await rendering.awaited(render(given, **render_options)), text
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
        # What is wrong with the parameters is told before anything is rendered.
        inputs = await asyncio.to_thread(self._processor.inputs, params)
        made = await side_by_side(rendered)
        return await asyncio.to_thread(
            self._processor.prepare_rendered, request_ids, made, params, inputs, options
        )


async def side_by_side(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """What works give, in their order. Of several errors, that of the first is raised. Nothing of
    them is left at the end.

    At most 16 go on at a time.
    """
    places, works = asyncio.Semaphore(_SIDE_BY_SIDE), list(works)

    async def placed(work: Coroutine[Any, Any, Result]) -> Result:
        async with places:
            return await work

    tasks = [asyncio.ensure_future(placed(one)) for one in works]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in works:
            # Those that have not begun.
            one.close()
