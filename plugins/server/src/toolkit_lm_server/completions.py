"""The route POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

from fastapi import Request, Response
from toolkit_lm.errors import RequestError
from toolkit_lm.frontend import side_by_side
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import ExplicitEncoderDecoderPrompt, Prompt, SingletonPrompt, TokensPrompt
from toolkit_lm_serving.prompts import prompt_makers

from toolkit_lm_server.answers import answer, encoded
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.errors import validated
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.fields import Items
from toolkit_lm_server.fill_in_the_middle import FillInTheMiddle
from toolkit_lm_server.fingerprint import Fingerprints
from toolkit_lm_server.generation import ChoicePiece, Generation, are_large
from toolkit_lm_server.logprobs import (
    TextPlaces,
    completion_logprobs,
    echo_logprobs,
    joined,
    prompt_logprobs,
    settle_logprobs,
)
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.protocol import SamplingBody, examples
from toolkit_lm_server.route import check_generates, check_priority, request_context
from toolkit_lm_server.threads import aside

if TYPE_CHECKING:
    from toolkit_lm.outputs import RequestOutput
    from toolkit_lm.renderer import Renderer


class CompletionBody(SamplingBody):
    """The body of POST /v1/completions."""

    model_config = examples(
        {"prompt": "Once upon a time", "max_tokens": 8},
        {"prompt": ["Once upon", "The cat"], "logprobs": 2, "stream": True},
    )

    may_cut_ends = True

    prompt: str | Items[str] | Items[int] | Items[Items[int]] | None = None
    """The prompts: a text, a list of token ids, or a list of either."""
    encoder_prompt: str | Items[int] | None = None
    """The encoder's prompt of an encoder-decoder model, in place of `prompt`. `decoder_prompt` may
    be given beside it."""
    decoder_prompt: str | Items[int] | None = None
    """The beginning of the decoder's prompt. null: the model's own."""
    suffix: str | None = None
    """Text after the completion, for a model that fills in the middle."""
    add_special_tokens: bool = True
    """Text prompts get the tokenizer's special tokens."""
    echo: bool = False
    """The answer begins with the prompt."""
    logprobs: int | None = None
    """Alternatives that log probabilities tell for each token. null: no log probabilities."""

    def params(self) -> SamplingParams:
        more: dict[str, Any] = {"max_tokens": self.most_tokens(16), "logprobs": self.logprobs}
        # Without a token to draw, a prompt is computed for its log probabilities, told or not.
        if self.echoes_logprobs or (self.echo and more["max_tokens"] == 0):
            more["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return self.sampling_params(**more)

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the prompt comes back with log probabilities of its own."""
        return self.echo and self.logprobs is not None

    def prompts(self, most: int) -> list[Prompt]:
        """The prompts of the body. Raises RequestError where there is none, or more than `most`."""
        prompts: Any = self.prompt
        if self.encoder_prompt is not None or self.decoder_prompt is not None:
            return [self._both_prompts()]
        if prompts is None:
            message = "Either prompt or prompt_embeds must be provided and non-empty."
            raise RequestError(
                f"{message} Give a prompt, an encoder_prompt, or prompt_embeds to a server that "
                "takes them (enable_prompt_embeds).",
                "prompt",
            )
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not prompts:
            raise RequestError("prompt is an empty list: give at least one prompt.", "prompt")
        if len(prompts) > most:
            raise RequestError(
                f"prompt has {len(prompts)} prompts; this server takes at most {most} in one "
                "request (max_prompts). Send them in several requests.",
                "prompt",
            )
        return [_prompt(prompt) for prompt in prompts]

    def _both_prompts(self) -> ExplicitEncoderDecoderPrompt:
        if self.prompt is not None or self.encoder_prompt is None:
            raise RequestError(
                "give decoder_prompt beside encoder_prompt, and either of them without prompt.",
                "encoder_prompt",
            )
        both = ExplicitEncoderDecoderPrompt(encoder_prompt=_prompt(self.encoder_prompt))
        if self.decoder_prompt is not None:
            both["decoder_prompt"] = _prompt(self.decoder_prompt)
        return both


def _prompt(prompt: str | list[int]) -> SingletonPrompt:
    return prompt if isinstance(prompt, str) else TokensPrompt(prompt_token_ids=prompt)


class Completions:
    """Completions of texts, by the served models."""

    def __init__(
        self,
        engines: Engines,
        options: ServerOptions,
        body: type[CompletionBody] = CompletionBody,
    ) -> None:
        """`body`: the body class with plugins' fields."""
        self._engines = engines
        self._options = options
        self.body = body
        self._fingerprints = Fingerprints(engines)
        self._fim = engines.each(lambda engine: FillInTheMiddle(engine.renderer))

    async def create(self, body: CompletionBody, request: Request) -> Response:
        """Completes one or several prompts."""
        begin = self.begin(body, request_context(request))
        if body.stream:
            return await stream_of(begin, lambda generation: self._chunks(body, generation))
        generation = await begin
        choices = await generation.choices()
        is_large = body.echo or body.prompt_logprobs is not None or are_large(choices)
        return await answer(lambda: self._whole(body, generation, choices), is_large=is_large)

    async def begin(
        self, body: CompletionBody, context: dict[str, str], *, fills: bool = False
    ) -> Generation:
        """Asks the engine. `fills`: the middle is wanted, even without a suffix. Raises
        RequestError and ApiError."""
        engine = self._engines[body.model]
        check_generates(engine)
        if -1 in (body.logprobs, body.prompt_logprobs):
            settle_logprobs(engine, body)
        params = body.params()
        prompts = await self._prompts(body, params)
        options = body.request_options(context)
        check_priority(engine, options)
        if body.suffix or fills or not body.add_special_tokens:
            with engine.hold_rendering(prompts, options):
                prompts = await self._rendered(body, prompts, fills)
        if body.truncation_side == "right" and params.truncate_prompt_tokens is not None:
            with engine.hold_rendering(prompts, options):
                prompts = await self._beginnings(body, prompts, params.truncate_prompt_tokens)
        outputs = engine.generate_many(prompts, params, **options)
        async with AsyncExitStack() as on_error:
            on_error.push_async_callback(outputs.aclose)
            generation = Generation(
                await anext(outputs),
                outputs,
                len(prompts),
                params.n,
                names=body.return_tokens_as_token_ids,
            )
            on_error.pop_all()
        await generation.check_first()
        return generation

    async def _prompts(self, body: CompletionBody, params: SamplingParams) -> list[Prompt]:
        """The prompts of the body, or the one that a plugin's field has. Raises RequestError."""
        makers = prompt_makers(self._engines[body.model]) if params.extra_args else []
        for name, maker in makers:
            made = await asyncio.to_thread(maker.prompt_of, params)
            if made is None:
                continue
            stated = ("prompt", "encoder_prompt", "decoder_prompt", "suffix", "echo")
            if besides := [field for field in stated if getattr(body, field)]:
                raise RequestError(f"give {besides[0]} or {name}, not both.", besides[0])
            return [made]
        return body.prompts(self._options.max_prompts)

    def _renderer(self, body: CompletionBody) -> Renderer:
        return self._engines[body.model].renderer

    async def _rendered(
        self, body: CompletionBody, prompts: Sequence[Prompt], fills: bool
    ) -> list[Prompt]:
        """The prompts, with those rendered that are not tokenized like usual texts."""
        if body.suffix and body.echo:
            raise RequestError("suffix is not supported with echo.", "suffix")
        if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
            raise RequestError("suffix is allowed only for prompts that are texts.", "suffix")
        if body.suffix or fills:
            suffix = body.suffix or ""
            fim = self._fim[body.model]
            return await asyncio.to_thread(
                lambda: [
                    fim.prompt(prompt, suffix) if isinstance(prompt, str) else prompt
                    for prompt in prompts
                ]
            )
        return await side_by_side(self._bare(body, prompt) for prompt in prompts)

    async def _bare(self, body: CompletionBody, prompt: Prompt) -> Prompt:
        """A text's tokens, without those that the tokenizer adds."""
        if not isinstance(prompt, str):
            return prompt
        rendered = await self._renderer(body).render_prompt_async(prompt, add_special_tokens=False)
        return {"prompt_token_ids": rendered.token_ids, "prompt": prompt}

    async def _beginnings(
        self, body: CompletionBody, prompts: Sequence[Prompt], most: int
    ) -> list[Prompt]:
        """The first tokens of each prompt, at most `most`."""
        if (
            body.suffix
            or body.encoder_prompt is not None
            or body.decoder_prompt is not None
            or most < 1
        ):
            message = (
                "truncation_side right is for prompts without a suffix, of models that only "
                "decode, and a number of tokens of at least 1."
            )
            raise RequestError(message, "truncation_side")
        return [await self._beginning(body, prompt, most) for prompt in prompts]

    async def _beginning(self, body: CompletionBody, prompt: Prompt, most: int) -> Prompt:
        rendered = await self._renderer(body).render_prompt_async(cast(SingletonPrompt, prompt))
        return {"prompt_token_ids": rendered.token_ids[:most]}

    async def ask(self, fields: Mapping[str, Any], context: dict[str, str]) -> Generation:
        """Checks the fields of a body, and asks the engine as `begin` does. Raises
        RequestValidationError, too."""
        return await self.begin(await aside(validated, self.body, fields), context)

    def _whole(
        self, body: CompletionBody, generation: Generation, choices: Sequence[ChoicePiece]
    ) -> dict[str, Any]:
        """The whole answer, for a body that asks for no stream."""
        return {
            **self._head(body, generation),
            "choices": self._whole_choices(body, generation, choices),
            "usage": generation.usage(),
            **_timings(body, generation),
            **generation.fields,
        }

    def _whole_choices(
        self, body: CompletionBody, generation: Generation, choices: Sequence[ChoicePiece]
    ) -> Iterator[dict[str, Any]]:
        """The choices of a whole answer. A prompt's log probabilities, which may be many, are made
        once for all of its choices."""
        known: RequestOutput | None = None
        made: dict[str, Any] = {"prompt_logprobs": None}
        for choice in choices:
            prompt = generation.prompt(choice.index)
            if body.prompt_logprobs is not None and prompt is not known:
                known = prompt
                made = {"prompt_logprobs": encoded(prompt_logprobs(prompt.prompt_logprobs))}
            yield self._whole_choice(body, generation, choice) | made

    def _whole_choice(
        self, body: CompletionBody, generation: Generation, piece: ChoicePiece
    ) -> dict[str, Any]:
        echo: dict[str, Any] = (
            self._echo(body, generation, piece.index) if body.echo else {"text": ""}
        )
        choice = self._choice(piece, body, TextPlaces(len(echo["text"])))
        choice |= generation.token_ids(piece) if body.return_token_ids else {}
        if body.echo:
            choice["text"] = echo["text"] + choice["text"]
            choice["logprobs"] = (
                joined(echo["logprobs"], choice["logprobs"]) if body.echoes_logprobs else None
            )
        return choice

    async def _chunks(
        self, body: CompletionBody, generation: Generation
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        head = self._head(body, generation)
        echoed: dict[int, TextPlaces] = {}
        """Places of each choice's tokens so far. With `echo`, a choice is here once its prompt was
        sent."""
        async for pieces in generation.pieces():
            chunks = []
            for piece in pieces:
                # The prompt's log probabilities are known when its first token is there.
                if body.echo and piece.index not in echoed:
                    echo = await asyncio.to_thread(self._echo, body, generation, piece.index)
                    echoed[piece.index] = TextPlaces(len(echo["text"]))
                    chunks.append(
                        {**head, "choices": [echo], **body.usage_so_far(generation.usage)}
                    )
                wanted = generation.token_ids(piece) if body.return_token_ids else {}
                if (
                    piece.text
                    or piece.logprobs
                    or piece.finish_reason is not None
                    or wanted.get("token_ids")
                ):
                    places = echoed.setdefault(piece.index, TextPlaces())
                    choice = self._choice(piece, body, places) | wanted
                    more = body.usage_so_far(generation.usage) | _timings(body, generation)
                    more |= generation.fields
                    chunks.append({**head, "choices": [choice], **more})
            yield chunks
        if body.include_usage:
            yield [{**head, "choices": [], "usage": generation.usage()}]

    def _echo(self, body: CompletionBody, generation: Generation, index: int) -> dict[str, Any]:
        """The part of a choice that repeats its prompt, as the engine read it."""
        prompt = generation.prompt(index)
        renderer = self._renderer(body)
        choice = self._choice(
            ChoicePiece(
                index,
                renderer.decode(prompt.prompt_token_ids)
                if prompt.prompt is None
                else prompt.prompt,
            ),
            None,
            TextPlaces(),
        )
        if body.echoes_logprobs:
            assert prompt.prompt_logprobs is not None and body.logprobs is not None
            [first] = renderer.token_texts(prompt.prompt_token_ids[:1])
            [name] = generation.token_names(renderer, prompt.prompt_token_ids[:1])
            # Only the first where the time was over before the prompt was computed.
            known = prompt.prompt_token_ids[: len(prompt.prompt_logprobs)]
            choice["logprobs"] = echo_logprobs(
                known, prompt.prompt_logprobs, body.logprobs, first, name, renderer.token_bytes
            )
        return choice

    def _choice(
        self, piece: ChoicePiece, body: CompletionBody | None, places: TextPlaces
    ) -> dict[str, Any]:
        """A choice from a piece of it. `body`: None where no log probabilities are told. `places`:
        those of the choice's tokens so far, to which the piece's are added."""
        logprobs = None
        if body is not None and body.logprobs is not None:
            token_bytes = self._renderer(body).token_bytes
            named = body.logprob_token_ids
            logprobs = completion_logprobs(
                piece.token_ids, piece.logprobs, body.logprobs, places, token_bytes, named
            )
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
            **piece.extras(),
        }

    def _head(self, body: CompletionBody, generation: Generation) -> dict[str, Any]:
        return {
            "id": f"cmpl-{generation.id}",
            "object": "text_completion",
            "created": generation.created,
            "model": self._engines[body.model].served_model_name,
            "system_fingerprint": self._fingerprints[body.model],
        }


def _timings(body: CompletionBody, generation: Generation) -> dict[str, Any]:
    return {"timings": generation.timings()} if body.timings else {}
