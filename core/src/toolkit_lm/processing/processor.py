"""The Processor: everything that users ask becomes a request in tokens here, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar, Unpack

from msgspec import structs

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import Task
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError
from toolkit_lm.messages import CacheKey, EngineRequest, SequenceInputs
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import PoolingInputs, Scoring, TextOptions
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.bad_words import BadWordRules
from toolkit_lm.processing.encoder_decoder import inputs_by_rules, load_rules
from toolkit_lm.processing.limits import RequestLimits
from toolkit_lm.processing.multimodal import cache_keys, check_features, cut_features
from toolkit_lm.processing.parts import RequestParts
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.processing.requests import PreparedRequest, RenderedPrompt, RequestOptions
from toolkit_lm.processing.validation import (
    check_bounds,
    check_count,
    check_options,
    check_token_ids,
    check_tokens_of_params,
    cut_prompt,
    prepare_processors,
)
from toolkit_lm.prompts import Conversation, Prompt, TextPair
from toolkit_lm.renderer import Rendered, RenderedText, Renderer

ResultT = TypeVar("ResultT")
_NO_INPUTS = "no loaded plugin reads the texts of pooling requests."
_NO_SAMPLING = SamplingParams()
"""Of requests that pool. It is checked when it is made, which takes a while."""


class Processor:
    """Renders and checks prompts, conversations, and texts and pairs for pooling: each of them
    once.

    One serves all requests of an engine, from several threads. Its methods raise RequestError,
    naming the parameter.
    """

    def __init__(self, config: VllmConfig, renderer: Renderer, plugins: Plugins) -> None:
        """`config` is resolved. `set_limits` must come before the first request."""
        self.config = config
        self.renderer = renderer
        self.plugins = plugins
        self._texts = _pooling_inputs(config, renderer, plugins)
        self._encoder_decoder = load_rules(config, renderer, plugins)
        self._parts = RequestParts(config, plugins)
        self._limits: RequestLimits | None = None
        try:
            self.default_params = SamplingParams(**config.sampling_defaults)
        except RequestError as error:
            raise CheckpointError(
                f"generation_config.json: {error} --generation-config none leaves it out."
            ) from error
        self._vocab_size = config.vocab_size or renderer.vocab_size
        self._bad_words = BadWordRules(renderer, self._vocab_size)
        self._eos_token_ids = renderer.eos_token_ids

    @property
    def texts(self) -> PoolingInputs:
        """What reads the texts of pooling requests. Raises RequestError where an engine that only
        generates has none."""
        if self._texts is None:
            raise RequestError(_NO_INPUTS, "task")
        return self._texts

    def set_limits(self, limits: RequestLimits) -> None:
        """What the engine can serve, once it is ready."""
        self._limits = limits

    @property
    def limits(self) -> RequestLimits:
        assert self._limits is not None, "the engine is not ready: call wait_ready first"
        return self._limits

    @property
    def reads_pairs(self) -> bool:
        """Prompts are of an encoder-decoder model, whose rules render them."""
        return self._encoder_decoder is not None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the model serves; nothing before the engine has been ready."""
        if self._limits is None:
            return ()
        generates: tuple[Task, ...] = ("generate",) if self.limits.generates else ()
        return (*generates, *self.limits.pooling)

    # Generation

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> PreparedRequest:
        """Of a text, or token ids."""
        [prepared] = self.prepare_batch([request_id], [prompt], params, options)
        return prepared

    def prepare_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[PreparedRequest]:
        """As `prepare`, of prompts that share parameters: these are worked on once."""
        params = copy(params or self.default_params)
        options = options or {}
        if self._encoder_decoder is not None:
            read = partial(self._encoder_decoder.read, params=params)
            rendered = (RenderedPrompt(*self._render(read, one)) for one in prompts)
        else:
            render = self.renderer.render_prompt
            salt = options.get("cache_salt")
            rendered = (self._rendered(render, one, text_of(one), salt) for one in prompts)
        return self.prepare_rendered(request_ids, rendered, params, self.inputs(params), options)

    def prepare_chat(
        self,
        request_id: str,
        messages: Conversation,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **render_options: Any,
    ) -> PreparedRequest:
        """Of a conversation, through the chat template. `render_options` are
        Renderer.render_conversation's."""
        [prepared] = self.prepare_chat_batch(
            [request_id], [messages], params, options, **render_options
        )
        return prepared

    def prepare_chat_batch(
        self,
        request_ids: Sequence[str],
        conversations: Sequence[Conversation],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **render_options: Any,
    ) -> list[PreparedRequest]:
        """As `prepare_chat`, of conversations that share parameters: these are worked on once."""
        params = copy(params or self.default_params)
        options = options or {}
        if self._encoder_decoder is not None:
            read = partial(self._encoder_decoder.read_conversation, params=params, **render_options)
            rendered = (RenderedPrompt(*self._render(read, one)) for one in conversations)
        else:
            render = self.renderer.render_conversation
            salt = options.get("cache_salt")
            rendered = (
                self._rendered(render, one, None, salt, **render_options) for one in conversations
            )
        return self.prepare_rendered(request_ids, rendered, params, self.inputs(params), options)

    def _render(self, render: Callable[..., ResultT], given: Any, **render_options: Any) -> ResultT:
        try:
            return render(given, **render_options)
        except Exception as error:
            self.plugins.boundary.check(error)
            raise

    def _rendered(
        self,
        render: Callable[..., Rendered],
        given: Any,
        text: str | None,
        salt: str | None,
        **render_options: Any,
    ) -> RenderedPrompt:
        if self.renderer.rules is None:
            rendered = self._render(render, given, **render_options)
            return RenderedPrompt(rendered.token_ids, text, features=rendered.features)
        rendering = self.rendering(render, given, salt, **render_options)
        return self.rendered_by(rendering, rendering(), text)

    def rendering(
        self, render: Callable[..., Rendered], given: Any, salt: str | None, **render_options: Any
    ) -> PinnedRendering:
        """What renders a prompt or a conversation by a method of the renderer, now and for
        `render_again`."""
        return PinnedRendering(partial(self._render, render, given, **render_options), salt)

    def rendered_by(
        self, rendering: PinnedRendering, rendered: Rendered, text: str | None
    ) -> RenderedPrompt:
        """What `rendering` has given. `text`: the prompt's own, if it is one."""
        is_held = rendered.features and self.renderer.feature_cache is not None
        return RenderedPrompt(
            rendered.token_ids,
            text,
            features=rendered.features,
            rendering=rendering if is_held else None,
        )

    def render_again(self, prepared: PreparedRequest) -> None:
        """Gives it the data of items that the engine no longer holds. Raises RequestError."""
        assert prepared.rendering is not None, "it has items of media"
        rendered = prepared.rendering()
        features = prepared.message.features
        again = rendered.features or []
        with self.plugins.boundary:
            check_features(again, rendered.token_ids, self.renderer, prepared.rendering.found)
        if [one.mm_identifier for one in again] != [one.mm_identifier for one in features]:
            raise RequestError(
                "the prompt's items of media are other ones when they are read again.",
                "multi_modal_data",
            )
        prepared.message.features = [
            structs.replace(old, data=new.data) for old, new in zip(features, again, strict=True)
        ]

    def prepare_rendered(
        self,
        request_ids: Sequence[str],
        rendered: Iterable[RenderedPrompt],
        params: SamplingParams,
        inputs: SequenceInputs,
        options: RequestOptions,
    ) -> list[PreparedRequest]:
        """The last part of `prepare_batch`. `inputs` are those of `params`, which nobody else
        holds."""
        return [
            self._prepared(one, its, params, inputs, options)
            for one, its in zip(request_ids, rendered, strict=True)
        ]

    def inputs(self, params: SamplingParams) -> SequenceInputs:
        """What the runner needs of parameters, which are checked. Raises RequestError."""
        check_bounds(params, self.config.limits)
        if params.stop and not self.renderer.has_text:
            raise RequestError(
                "stop is a text, and this engine makes none of its tokens: use stop_token_ids.",
                "stop",
            )
        inputs = SequenceInputs()
        of_processors = params.of_processors
        if params.bad_words or of_processors:
            registry = self.plugins.logits_processors
            arguments = prepare_processors(of_processors, registry, self.renderer)
            inputs = SequenceInputs(
                forbidden_texts=self._bad_words.of(params),
                logits_processors={
                    name: one for name, one in arguments.items() if not registry.get(name).for_model
                },
                model_arguments={
                    name: one for name, one in arguments.items() if registry.get(name).for_model
                },
            )
        check_tokens_of_params(params, self._vocab_size)
        return inputs

    def _prepared(
        self,
        request_id: str,
        rendered: RenderedPrompt,
        params: SamplingParams,
        inputs: SequenceInputs,
        options: RequestOptions,
    ) -> PreparedRequest:
        token_ids = rendered.token_ids
        text = rendered.text
        features = rendered.features or []
        check_token_ids(token_ids, self._vocab_size)
        if features or self.renderer.rules is not None:
            with self.plugins.boundary:
                check_features(
                    features,
                    token_ids,
                    self.renderer,
                    rendered.rendering.found if rendered.rendering else {},
                )
        if params.truncate_prompt_tokens is not None and rendered.encoder is None:
            cut = cut_prompt(token_ids, params, self.config.max_model_len)
            if text is not None and len(cut) < len(token_ids):
                text = self.renderer.decode(cut)
            features = cut_features(features, len(token_ids) - len(cut))
            token_ids = cut
        message = self._message(request_id, token_ids, params, options)
        message.inputs = inputs
        message.features = features
        if inputs.logits_processors or inputs.model_arguments:
            arguments = {**inputs.logits_processors, **inputs.model_arguments}
            # What a part makes of its arguments, it says itself.
            for name in self._parts.by_name:
                arguments.pop(name, None)
            message.cache_keys += self._keys_of(arguments)
        if features:
            message.cache_keys += cache_keys(features)
        if rendered.encoder is not None:
            check_token_ids(rendered.encoder.token_ids, self._vocab_size)
            message.encoder = rendered.encoder
        # Log probabilities of the prompt come from its hidden states, which no cache holds.
        message.reads_prefix_cache = params.prompt_logprobs is None
        message.max_output_tokens = self.limits.check(message)
        if self._encoder_decoder is not None:
            message.inputs = inputs_by_rules(
                self._encoder_decoder, message, self._vocab_size, self.plugins
            )
        if self._parts.by_name:
            self._parts.prepare(message)
        scope = options.get("stop_scope")
        return PreparedRequest(message, text, rendered.encoder_text, rendered.rendering, scope)

    def _keys_of(self, arguments: dict[str, dict[str, Any]]) -> list[CacheKey]:
        """That of what plugins' parameters change in the forward pass. No salt of a client's can be
        equal to it: those are of one token."""
        key = self.plugins.logits_processors.cache_key(arguments)
        return [] if key is None else [CacheKey(0, 2, key)]

    # Pooling

    def prepare_pooling_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt | TextPair],
        params: Sequence[PoolingParams],
        options: RequestOptions | None = None,
        **text_options: Unpack[TextOptions],
    ) -> list[PreparedRequest | RequestError]:
        """Each prompt, or pair of texts, as a prepared request, or why it cannot be one. `params`
        are one for each.

        Raises RequestError for what is wrong with all of them.
        """
        options = options or {}
        check_options(options)
        check_count(request_ids, "request_ids", len(prompts))
        for distinct in {id(one): one for one in params}.values():
            self.check_pooling(distinct)
        rendered = self.texts.render(prompts, **text_options)
        prepared: list[PreparedRequest | RequestError] = []
        now = time.monotonic()
        for request_id, text, prompt, its in zip(
            request_ids, rendered, prompts, params, strict=True
        ):
            try:
                if isinstance(text, RequestError):
                    raise text
                one = self._pooling(request_id, text, prompt, its, options)
                # They arrive together, and so are served in the order in which they are submitted.
                one.message.arrival_time = now
                prepared.append(one)
            except RequestError as error:
                prepared.append(error)
        return prepared

    def check_pooling(self, params: PoolingParams) -> None:
        """Raises RequestError for a task that the model does not serve, or what the task cannot
        give."""
        size = self.limits.rules(params.task).size
        if size is not None:
            self.texts.check(params, size)

    def scoring(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        fields: tuple[str, str] = ("queries", "documents"),
    ) -> Scoring:
        """One query for all documents, or one for each; `fields` are what errors call the two.
        Raises RequestError."""
        return self.texts.scoring(queries, documents, self.tasks, fields)

    def _pooling(
        self,
        request_id: str,
        rendered: RenderedText,
        prompt: Prompt | TextPair,
        params: PoolingParams,
        options: RequestOptions,
    ) -> PreparedRequest:
        check_token_ids(rendered.token_ids, self._vocab_size)
        if params.step_tag_id is not None:
            check_token_ids([params.step_tag_id], self._vocab_size, "step_tag_id")
        message = self._message(request_id, rendered.token_ids, _NO_SAMPLING, options)
        message.inputs = SequenceInputs(
            pooling=params,
            second_text_start=rendered.second_text_start,
            pooling_start=rendered.pooling_start if params.task == "embed" else 0,
            num_attended=rendered.num_attended,
        )
        rules = self.limits.rules(params.task)
        message.chunkable = rules.chunkable
        message.reads_prefix_cache = rules.reads_prefix_cache
        # What a pooler keeps of a sequence between its chunks is lost with its row.
        message.draws_tokens = message.swappable = False
        self.limits.check(message)
        if self._parts.by_name:
            self._parts.prepare(message)
        return PreparedRequest(message, prompt if isinstance(prompt, str) else None)

    # Both

    def _message(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> EngineRequest:
        if not isinstance(request_id, str):
            raise RequestError(
                f"a request id must be a text, not a {type(request_id).__name__}.", "request_id"
            )
        if options:
            check_options(options)
        now = time.monotonic()
        timeout = options.get("timeout")
        salt = options.get("cache_salt")
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            eos_token_ids=self._eos_token_ids,
            priority=options.get("priority", 0),
            arrival_time=now,
            deadline=None if timeout is None else now + timeout,
            cache_keys=[CacheKey(0, 1, salt)] if salt else [],
            context=options.get("context", {}),
        )


def _pooling_inputs(
    config: VllmConfig, renderer: Renderer, plugins: Plugins
) -> PoolingInputs | None:
    """None where nobody needs any. Raises ConfigError."""
    # mypy: an abstract class stands for those that are made.
    kind: Any = PoolingInputs
    found: PoolingInputs | None = plugins.pooling_inputs.first_result(
        kind, config, renderer, plugins
    )
    if found is None and (config.model.runner == "pooling" or config.model.extra_tasks):
        raise ConfigError(f"{_NO_INPUTS} {plugins.pooling_inputs.way_out}".rstrip())
    return found


def text_of(prompt: Any) -> str | None:
    """That of a prompt which is one, or has one."""
    if isinstance(prompt, str):
        return prompt
    return prompt.get("prompt") if hasattr(prompt, "get") else None
