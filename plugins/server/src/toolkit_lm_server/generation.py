"""One HTTP request's work in the engine: its outputs as pieces of choices, and what it used."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit_lm.outputs import CompletionOutput, Logprob, RequestOutput
from toolkit_lm.params import OF_THE_REQUEST

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.logprobs import ID_MARK

if TYPE_CHECKING:
    from toolkit_lm.renderer import Renderer

logger = logging.getLogger("uvicorn.error")

_PLACE = re.compile(r"(plugin '[^']*' \([^()]*), [^(),]*:\d+\)")
"""A plugin that has failed, and in which line of which file."""
_LARGE = 5_000
"""Characters and log probabilities of an answer whose making would be felt on the event loop."""

Outputs = AsyncGenerator[list[tuple[int, RequestOutput]], None]
"""What AsyncLLM.generate_many gives."""


@dataclass(slots=True)
class Piece:
    """A part of one choice: what is new in it, or the whole of it."""

    index: int
    """Of the choice: n choices per prompt, prompt by prompt."""
    text: str
    text_offset: int = 0
    """Characters of the choice before this text."""
    token_ids: list[int] = field(default_factory=list)
    token_offset: int = 0
    """Tokens of the choice before these."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """One per token, where asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generation:
    """The engine's work on some prompts. Take its `pieces` or its `choices`; `usage` is final after
    that."""

    def __init__(
        self,
        first: list[tuple[int, RequestOutput]],
        rest: Outputs,
        num_prompts: int,
        n: int,
        *,
        names: bool = False,
    ) -> None:
        """`first`: what `rest` gave before. Whoever awaits it learns of a bad request
        (RequestError) before an answer has begun.

        Outputs are deltas, or final ones only. `names`: log probabilities name tokens by their ids.
        """
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self._first = first
        self._rest = rest
        self._num_prompts = num_prompts
        self._n = n
        self._names = names
        self._latest: dict[int, RequestOutput] = {}
        self._num_characters = [0] * (num_prompts * n)
        self._num_tokens = [0] * (num_prompts * n)

    async def check_first(self) -> None:
        """Raises ApiError where a sequence failed at once (400, 500), or the time was over before
        there was any token (504).

        A partial answer is an answer.
        """
        choices = [choice for _, output in self._first for choice in output.outputs]
        # What is not there yet may still get a token.
        late = len(choices) == self._num_prompts * self._n and all(
            _is_late(choice) for choice in choices
        )
        failures = [_failure(output) for _, output in self._first if _has_failed(output)]
        if late or failures:
            await self.aclose()
            raise failures[0] if failures else _too_late()

    async def aclose(self) -> None:
        """Aborts what is not finished."""
        await self._rest.aclose()

    @property
    def first_prompt_token_ids(self) -> list[int]:
        """Of the first prompt: they are known before there are pieces."""
        return self._first[0][1].prompt_token_ids

    def prompt(self, choice: int) -> RequestOutput:
        """What is known of a choice's prompt: the tokens that the engine read, its log
        probabilities once the choice has a token."""
        return self._latest[choice // self._n]

    def token_names(self, renderer: Renderer, token_ids: Sequence[int]) -> list[str]:
        """As log probabilities have them."""
        return list(map(_name, token_ids)) if self._names else renderer.token_texts(token_ids)

    def token_ids(self, one: Piece) -> dict[str, Any]:
        """vLLM's fields of a choice: its token ids, and with the first of them those of its
        prompt."""
        first = (
            {}
            if one.token_offset
            else {"prompt_token_ids": self.prompt(one.index).prompt_token_ids}
        )
        return {"token_ids": one.token_ids, **first}

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, as it comes. Raises ApiError when a sequence fails: 400 where the request's
        parameters are why, else 500."""
        yield self._pieces(self._first)
        async for found in self._rest:
            yield self._pieces(found)

    async def choices(self) -> list[Piece]:
        """Every choice, in order, where outputs are final ones only. Aborts the requests when it is
        cancelled."""
        async with aclosing(self):
            found = [piece async for pieces in self.pieces() for piece in pieces]
        if all(map(_is_late, found)):
            raise _too_late()
        return sorted(found, key=lambda piece: piece.index)

    def usage(self) -> dict[str, Any]:
        """Token counts, so far. Prompts count as the engine read them."""
        prompt = sum(output.num_prompt_tokens for output in self._latest.values())
        completion = sum(self._num_tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens for output in self._latest.values())
            },
        }

    def _pieces(self, found: list[tuple[int, RequestOutput]]) -> list[Piece]:
        pieces = []
        for number, output in found:
            if self._names:
                known = () if number in self._latest else output.prompt_logprobs or ()
                _name_tokens(
                    [*known, *(table for one in output.outputs for table in one.logprobs or ())]
                )
            self._latest[number] = output
            if _has_failed(output):
                raise _failure(output)
            pieces += [self._piece(number * self._n + one.index, one) for one in output.outputs]
        return pieces

    def _piece(self, index: int, new: CompletionOutput) -> Piece:
        offset = self._num_characters[index]
        before = self._num_tokens[index]
        self._num_characters[index] += len(new.text)
        self._num_tokens[index] += len(new.token_ids)
        return Piece(
            index,
            new.text,
            offset,
            new.token_ids,
            before,
            new.logprobs or [],
            new.finish_reason,
            new.stop_reason,
        )


def _name(token_id: int) -> str:
    return f"{ID_MARK}{token_id}"


def _name_tokens(tables: Sequence[dict[int, Logprob] | None]) -> None:
    for table in tables:
        for token_id, entry in (table or {}).items():
            entry.decoded_token = _name(token_id)


def are_large(choices: Sequence[Piece]) -> bool:
    """Whether an answer with these choices takes long to make."""
    return sum(len(one.text) + sum(map(len, one.logprobs)) for one in choices) > _LARGE


def _has_failed(output: RequestOutput) -> bool:
    return any(one.finish_reason == "error" for one in output.outputs)


def _failure(output: RequestOutput) -> ApiError:
    error = output.error or ""
    if error.startswith(OF_THE_REQUEST):
        code = "no_token_left" if error.startswith(f"{OF_THE_REQUEST} leave") else "too_complex"
        return ApiError(400, f"{error[0].upper()}{error[1:]}.", code=code)
    return model_failure("this request", error)


def model_failure(what: str, error: str) -> ApiError:
    """The answer where the model has failed on `what`. Where the files of plugins lie goes to the
    log only."""
    logger.error("the model failed on %s: %s", what, json.dumps(error))
    told = _PLACE.sub(r"\1)", error)
    return ApiError(500, f"The model failed on {what}: {told}.", code="model_error")


def _is_late(one: CompletionOutput | Piece) -> bool:
    return one.finish_reason == "timeout" and not one.token_ids


def _too_late() -> ApiError:
    return ApiError(
        504, "The request's timeout was over before a token was generated.", code="timeout"
    )
