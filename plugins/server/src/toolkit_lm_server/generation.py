"""The engine's work for one HTTP request: its outputs as pieces of choices, and its token
counts."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit_lm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from toolkit_lm.params import OF_THE_REQUEST

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.logprobs import ID_MARK

if TYPE_CHECKING:
    import numpy as np
    from toolkit_lm.renderer import Renderer

logger = logging.getLogger("uvicorn.error")

_PLACE = re.compile(r"(plugin '[^']*' \([^()]*), [^(),]*:\d+\)")
"""A plugin that has failed, and the line and file of the failure."""
_LARGE = 5_000
"""Characters and log probabilities of an answer that would block the event loop while it is
made."""

_JSON = ".json"
"""End of the name of an array that is JSON in UTF-8: a field of the answer, or of the choice where
a request has several prompts."""

Outputs = AsyncGenerator[list[tuple[int, RequestOutput]], None]
"""The outputs of AsyncLLM.generate_many."""


@dataclass(slots=True)
class ChoicePiece:
    """A part of one choice: what is new in it, or the whole of it."""

    index: int
    """Index of the choice: n choices per prompt, prompt by prompt."""
    text: str
    token_ids: list[int] = field(default_factory=list)
    token_offset: int = 0
    """Tokens of the choice before this piece."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Log probabilities of each token, where asked for."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    """`weight_versions` of a finished choice, if weights have changed since the start."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Arrays of a finished choice, such as its routed experts, by name."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of plugins, where the request has several prompts."""

    def extras(self) -> dict[str, Any]:
        """Fields of a finished choice that OpenAI's API lacks. Arrays are in base64, as NumPy's
        `save` writes them."""
        saved = {
            name: _saved(array) for name, array in self.arrays.items() if not name.endswith(_JSON)
        }
        return self.versions | self.fields | saved


class Generation:
    """The engine's work on some prompts. Take `pieces` or `choices`. After that, `usage` is
    final."""

    def __init__(
        self,
        first: list[tuple[int, RequestOutput]],
        rest: Outputs,
        num_prompts: int,
        n: int,
        *,
        names: bool = False,
    ) -> None:
        """`first`: the first outputs of `rest`. Awaiting them shows a bad request (RequestError)
        before an answer has begun.

        Outputs are deltas, or final ones only. `names`: log probabilities name tokens by their ids.
        """
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self._first = first
        self._rest = rest
        self._num_prompts = num_prompts
        self._n = n
        self._names = names
        self.fields: dict[str, Any] = {}
        """Fields of plugins in the answer, once a choice of a single prompt has ended."""
        self._latest: dict[int, RequestOutput] = {}
        self._num_tokens = [0] * (num_prompts * n)

    async def check_first(self) -> None:
        """Raises ApiError where a sequence failed at once (400, 500), or the time was over before
        any token came (504).

        A partial answer is an answer.
        """
        choices = [choice for _, output in self._first for choice in output.outputs]
        # An output that does not exist yet may still get a token.
        late = len(choices) == self._num_prompts * self._n and all(
            _is_late(choice) for choice in choices
        )
        failures = [_failure(output) for _, output in self._first if _has_failed(output)]
        if late or failures:
            await self.aclose()
            raise failures[0] if failures else _too_late()

    async def aclose(self) -> None:
        """Aborts the sequences that are not finished."""
        await self._rest.aclose()

    @property
    def first_prompt_token_ids(self) -> list[int]:
        """The first prompt's token ids, known before any piece."""
        return self._first[0][1].prompt_token_ids

    def prompt(self, choice: int) -> RequestOutput:
        """The output that describes a choice's prompt: its token ids, and its log probabilities
        once the choice has a token."""
        return self._latest[choice // self._n]

    def token_names(self, renderer: Renderer, token_ids: Sequence[int]) -> list[str]:
        """Names of tokens, as log probabilities have them."""
        return list(map(_name, token_ids)) if self._names else renderer.token_texts(token_ids)

    def token_ids(self, piece: ChoicePiece) -> dict[str, Any]:
        """vLLM's fields of a choice: its token ids. The choice's first piece has the prompt's token
        ids, too."""
        first = (
            {}
            if piece.token_offset
            else {"prompt_token_ids": self.prompt(piece.index).prompt_token_ids}
        )
        return {"token_ids": piece.token_ids, **first}

    async def pieces(self) -> AsyncGenerator[list[ChoicePiece], None]:
        """The new pieces, as they come. Raises ApiError when a sequence fails: 400 where the
        request's parameters are the cause, else 500."""
        yield self._pieces(self._first)
        async for found in self._rest:
            yield self._pieces(found)

    async def choices(self) -> list[ChoicePiece]:
        """Every choice in order, from outputs that are final ones only. Aborts the requests when it
        is cancelled."""
        async with aclosing(self):
            found = [piece async for pieces in self.pieces() for piece in pieces]
        if all(map(_is_late, found)):
            raise _too_late()
        return sorted(found, key=lambda piece: piece.index)

    def usage(self) -> dict[str, Any]:
        """Token counts so far. Prompts count as the engine read them."""
        prompt = sum(output.num_prompt_tokens for output in self._latest.values())
        completion = sum(self._num_tokens)
        metrics = _metrics(self._latest.values())
        drafted = sum(timing.num_draft_tokens for timing in metrics)
        accepted = sum(timing.num_accepted_tokens for timing in metrics)
        drafts: dict[str, Any] = {}
        if drafted:
            drafts = {"draft_tokens": drafted, "accepted_draft_tokens": accepted}
            drafts["drafters"] = {
                name: {
                    "draft_tokens": sum(timing.drafters.get(name, (0, 0))[0] for timing in metrics),
                    "accepted_draft_tokens": sum(
                        timing.drafters.get(name, (0, 0))[1] for timing in metrics
                    ),
                }
                for name in dict.fromkeys(name for timing in metrics for name in timing.drafters)
            }
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(output.num_cached_tokens for output in self._latest.values())
            },
            **drafts,
        }

    def timings(self) -> dict[str, Any] | None:
        """`timings_of` all prompts so far. None where no token has come, or the engine keeps no
        times."""
        outputs = [*self._latest.values()]
        if not any(timing.first_token_ts for timing in _metrics(outputs)):
            return None
        return timings_of(outputs, sum(self._num_tokens))

    def _pieces(self, found: list[tuple[int, RequestOutput]]) -> list[ChoicePiece]:
        pieces = []
        for number, output in found:
            if self._names:
                known = () if number in self._latest else output.prompt_logprobs or ()
                _name_tokens(
                    [
                        *known,
                        *(table for output in output.outputs for table in output.logprobs or ()),
                    ]
                )
            self._latest[number] = output
            if _has_failed(output):
                raise _failure(output)
            pieces += [
                self._piece(number * self._n + output.index, output) for output in output.outputs
            ]
        return pieces

    def _piece(self, index: int, new: CompletionOutput) -> ChoicePiece:
        before = self._num_tokens[index]
        self._num_tokens[index] += len(new.token_ids)
        fields = {
            name.removesuffix(_JSON): json.loads(array.tobytes())
            for name, array in new.arrays.items()
            if name.endswith(_JSON)
        }
        if self._num_prompts == 1:
            self.fields |= fields
            fields = {}
        return ChoicePiece(
            index,
            new.text,
            new.token_ids,
            before,
            new.logprobs or [],
            new.finish_reason,
            new.stop_reason,
            _versions(new),
            new.arrays,
            fields,
        )


def _saved(array: np.ndarray) -> str:
    import numpy as np

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def _versions(output: CompletionOutput) -> dict[str, Any]:
    spans = output.weight_versions or ()
    return {"weight_versions": [*map(asdict, spans)]} if any(s.version for s in spans) else {}


def timings_of(outputs: Collection[RequestOutput], num_tokens: int) -> dict[str, Any]:
    """Times in llama.cpp's shape: those of prompts, from their arrival to the first token, and
    those of the tokens after the first. 0 where there is no token yet.

    `num_tokens`: tokens of all answers to the prompts.
    """
    cached = sum(output.num_cached_tokens for output in outputs)
    prompt = sum(output.num_prompt_tokens for output in outputs) - cached
    metrics = _metrics(outputs)
    starts = [timing.first_token_ts for timing in metrics if timing.first_token_ts is not None]
    ends = [timing.last_token_ts for timing in metrics if timing.last_token_ts is not None]
    first = min(starts, default=0.0)
    waited = first - min(timing.arrival_time for timing in metrics) if starts else 0.0
    spent = max(ends, default=first) - first
    return {
        "cache_n": cached,
        **_rates("prompt", prompt, prompt, waited),
        **_rates("predicted", num_tokens, max(num_tokens - len(starts), 0), spent),
    }


def _metrics(outputs: Collection[RequestOutput]) -> list[RequestMetrics]:
    return [output.metrics for output in outputs if output.metrics]


def _rates(name: str, count: int, timed: int, seconds: float) -> dict[str, Any]:
    """Fields of timings: `count` tokens, of which `timed` took `seconds`. A rate without a time is
    0."""
    return {
        f"{name}_n": count,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / timed if timed else 0.0,
        f"{name}_per_second": timed / seconds if seconds > 0 else 0.0,
    }


def _name(token_id: int) -> str:
    return f"{ID_MARK}{token_id}"


def _name_tokens(tables: Sequence[dict[int, Logprob] | None]) -> None:
    for table in tables:
        for token_id, entry in (table or {}).items():
            entry.decoded_token = _name(token_id)


def are_large(choices: Sequence[ChoicePiece]) -> bool:
    """Whether an answer with these choices takes long to make."""
    return sum(len(choice.text) + sum(map(len, choice.logprobs)) for choice in choices) > _LARGE


def _has_failed(output: RequestOutput) -> bool:
    return any(output.finish_reason == "error" for output in output.outputs)


def _failure(output: RequestOutput) -> ApiError:
    error = output.error or ""
    if error.startswith(OF_THE_REQUEST):
        code = "no_token_left" if error.startswith(f"{OF_THE_REQUEST} leave") else "too_complex"
        return ApiError(400, f"{error[0].upper()}{error[1:]}.", code=code)
    return model_failure("this request", error)


def model_failure(subject: str, error: str) -> ApiError:
    """The error of a model that has failed on `subject`. The paths of plugins' files go to the log
    only."""
    logger.error("the model failed on %s: %s", subject, json.dumps(error))
    message = _PLACE.sub(r"\1)", error)
    return ApiError(500, f"The model failed on {subject}: {message}.", code="model_error")


def _is_late(output: CompletionOutput | ChoicePiece) -> bool:
    return output.finish_reason == "timeout" and not output.token_ids


def _too_late() -> ApiError:
    return ApiError(
        504, "The request's timeout was over before a token was generated.", code="timeout"
    )
