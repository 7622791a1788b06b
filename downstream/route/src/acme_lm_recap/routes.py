"""GET /recap, POST /recap and POST /recap/title."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from toolkit_lm import RequestOutputKind, SamplingParams
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import request_context
from toolkit_lm_serving.engine import ServingEngine

from acme_lm_recap import Options

TITLE_TOKENS = 8


class RecapBody(BaseModel):
    """Body of a request."""

    text: str = Field(min_length=1, max_length=20_000)


class Recaps:
    """The routes of one server."""

    def __init__(self, engine: ServingEngine, options: Options, api: OpenAIApi) -> None:
        self.engine = engine
        self.options = options
        self.api = api
        self.is_open = False
        self.count = 0

    def add_to(self, router: APIRouter) -> Callable[[], AbstractAsyncContextManager[object]]:
        router.get("/recap")(self.state)
        router.post("/recap")(self.recap)
        router.post("/recap/title")(self.title)
        return self.lifespan

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        self.is_open = True
        yield
        self.is_open = False

    def state(self) -> dict[str, Any]:
        """The model, and the number of recaps so far."""
        model = self.engine.config.served_model_name
        return {"model": model, "is_open": self.is_open, "count": self.count}

    async def recap(self, request: Request, body: RecapBody) -> dict[str, Any]:
        """A chat, in OpenAI's form."""
        fields = {
            "messages": [{"role": "user", "content": f"In short: {body.text}"}],
            "max_tokens": self.options.max_tokens,
            "temperature": 0,
        }
        answer = await self.api.chat.ask(fields, request_context(request))
        completion = await answer.completion()
        self.count += 1
        (choice,) = completion["choices"]
        return {
            "recap": choice["message"]["content"],
            "tokens": completion["usage"]["completion_tokens"],
        }

    async def title(self, body: RecapBody) -> dict[str, str]:
        """A prompt, asked of the engine itself."""
        params = SamplingParams(
            temperature=0, max_tokens=TITLE_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY
        )
        title = ""
        async for output in self.engine.generate(body.text, params):
            title = output.outputs[0].text
        self.count += 1
        return {"title": title}
