"""The route POST /infill, as llama.cpp has it: editors ask for the text between two others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, Literal

from fastapi import Request, Response
from pydantic import ConfigDict
from toolkit_lm.errors import RequestError

from toolkit_lm_server.answers import answer
from toolkit_lm_server.completions import CompletionBody, Completions
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.fields import Items
from toolkit_lm_server.generation import ChoicePiece, Generation, are_large
from toolkit_lm_server.protocol import SamplingBody, examples
from toolkit_lm_server.request_fields import INFILL
from toolkit_lm_server.route import request_context
from toolkit_lm_server.schema_texts import Described

_MOST = 128
"""Tokens of an answer where the body sets no limit."""
_WITHOUT_PLACE = (
    "prompt_logprobs",
    "logprob_token_ids",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "timings",
    "return_hidden_states",
    "return_routed_experts",
    "kv_transfer_params",
)
_SNIPPET = "\n\n--- snippet ---\n\n"
_STOP_TYPES = {"stop": "eos", "length": "limit"}


class Filling(Described):
    """The whole answer of /infill, or an event of its stream. Events before a choice's last have
    the first three fields alone."""

    index: int
    """The choice's place."""
    content: str
    """The text, or what is new of it."""
    stop: bool
    """The text is whole."""
    stop_type: Literal["eos", "limit", "none"] | None = None
    """The reason of the end."""
    model: str | None = None
    """The model that answered, by its first name."""
    tokens_predicted: int | None = None
    """Tokens of the output."""
    tokens_evaluated: int | None = None
    """Tokens of the prompt."""
    tokens_cached: int | None = None
    """Tokens of the prompt that were found in the cache."""
    truncated: bool | None = None
    """Always false: prompts are never cut in silence."""


class Snippet(Described):
    """A text that gives the model context."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str
    """The text."""
    filename: str | None = None
    """The name of its file, shown before it."""


class InfillBody(SamplingBody):
    """The body of POST /infill."""

    model_config = examples(
        {"input_prefix": "def add(a, b):\n    return", "input_suffix": "\n", "n_predict": 8}
    )

    verdicts = INFILL

    input_prefix: str = ""
    """Text before the gap."""
    input_suffix: str = ""
    """Text after the gap."""
    input_extra: Items[Snippet] = []
    """Other texts of the project."""
    prompt: str = ""
    """Text that follows the prefix already."""
    n_predict: int | None = None
    """Most tokens of the answer, llama.cpp's name of max_tokens. -1: as many as fit."""

    def completion(self, kind: type[CompletionBody], max_model_len: int) -> CompletionBody:
        """The body as one of /v1/completions. Raises ValidationError and RequestError."""
        for name in _WITHOUT_PLACE:
            if getattr(self, name, None) not in (None, False):
                raise RequestError(
                    f"{name} is for /v1/completions: an answer here has no place for it.", name
                )
        if self.n not in (None, 1):
            raise RequestError("n must be 1: an answer here is one text.", "n")
        fields = self.model_dump(exclude_unset=True, exclude=set(InfillBody.__annotations__))
        before = "".join(f"{_SNIPPET}{snippet.text}" for snippet in self.input_extra)
        most = _MOST
        if self.n_predict is not None:
            most = max_model_len if self.n_predict < 0 else max(self.n_predict, 1)
        texts = {"prompt": before + self.input_prefix + self.prompt, "suffix": self.input_suffix}
        made: CompletionBody = kind.model_validate({"max_tokens": most, **fields, **texts})
        return made


class Infill:
    """Texts between two others, by the served models."""

    def __init__(self, engines: Engines, completions: Completions) -> None:
        self._engines = engines
        self._completions = completions

    async def create(self, body: InfillBody, request: Request) -> Response:
        """Fills in what stands between a prefix and a suffix."""
        completion = body.completion(
            self._completions.body, self._engines[body.model].config.max_model_len
        )
        begin = self._completions.begin(completion, request_context(request), fills=True)
        if body.stream:
            return await stream_of(begin, partial(self._events, body))
        generation = await begin
        [choice, *_] = choices = await generation.choices()
        return await answer(
            lambda: self._last(body, generation, choice), is_large=are_large(choices)
        )

    async def _events(
        self, body: InfillBody, generation: Generation
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        async for pieces in generation.pieces():
            yield [
                {"index": piece.index, "content": piece.text, "stop": False}
                if piece.finish_reason is None
                else self._last(body, generation, piece)
                for piece in pieces
            ]

    def _last(self, body: InfillBody, generation: Generation, piece: ChoicePiece) -> dict[str, Any]:
        """The whole answer, or the last event of a stream."""
        usage = generation.usage()
        return {
            "index": piece.index,
            "content": piece.text,
            "stop": True,
            "stop_type": _STOP_TYPES.get(piece.finish_reason or "", "none"),
            "model": self._engines[body.model].served_model_name,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
            "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
            "truncated": False,
        }
