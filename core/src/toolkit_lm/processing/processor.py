"""The Processor: the only place that converts users' input to requests in tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, TypeVar

from msgspec import structs

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import Task
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.messages import CacheKey, EngineRequest, SequenceInputs
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.bad_words import BadWordRules
from toolkit_lm.processing.encoder_decoder import inputs_by_rules, load_rules
from toolkit_lm.processing.limits import RequestLimits
from toolkit_lm.processing.multimodal import add_features, check_features, cut_features
from toolkit_lm.processing.parts import RequestParts
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.processing.pooling_processor import PoolingProcessor
from toolkit_lm.processing.requests import (
    PreparedRequest,
    RenderedPrompt,
    RequestOptions,
)
from toolkit_lm.processing.validation import (
    check_bounds,
    check_options,
    check_token_ids,
    check_tokens_of_params,
    cut_prompt,
    prepare_processors,
)
from toolkit_lm.prompts import Conversation, Prompt
from toolkit_lm.renderer import Rendered, Renderer

ResultT = TypeVar("ResultT")


class Processor:
    """Renders and checks prompts and conversations, each of them once. Texts and pairs for pooling
    are its `pooling`'s.

    One instance serves all requests of an engine, from several threads. Its methods raise
    RequestError, which names the parameter.
    """

    def __init__(self, config: VllmConfig, renderer: Renderer, plugins: Plugins) -> None:
        """`config` is resolved. `set_limits` must come before the first request."""
        self.config = config
        self.renderer = renderer
        self.plugins = plugins
        self._encoder_decoder = load_rules(config, renderer, plugins)
        self.parts = RequestParts(config, plugins)
        """Front halves of plugins' parts."""
        self._limits: RequestLimits | None = None
        try:
            self.default_params = SamplingParams(**config.sampling_defaults)
        except RequestError as error:
            raise CheckpointError(
                f"generation_config.json: {error} generation_config='none' leaves it out."
            ) from error
        self._vocab_size = config.vocab_size or renderer.vocab_size
        self.pooling = PoolingProcessor(
            config, renderer, plugins, self.parts, self._vocab_size, self._message
        )
        self._bad_words = BadWordRules(renderer, self._vocab_size)
        self._eos_token_ids = renderer.eos_token_ids

    def set_limits(self, limits: RequestLimits) -> None:
        """Sets the limits of the engine, once it is ready."""
        self._limits = self.pooling.limits = limits

    @property
    def limits(self) -> RequestLimits:
        assert self._limits is not None, "the engine is not ready: call wait_ready first"
        return self._limits

    @property
    def reads_pairs(self) -> bool:
        """Whether prompts are for an encoder-decoder model, whose rules render them."""
        return self._encoder_decoder is not None

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks that the model serves; empty until the engine has been ready."""
        return () if self._limits is None else self._limits.tasks

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> PreparedRequest:
        """Makes a request from a text, or token ids."""
        [prepared] = self.prepare_batch([request_id], [prompt], params, options)
        return prepared

    def prepare_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt],
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
    ) -> list[PreparedRequest]:
        """Makes requests from prompts that share parameters, as `prepare` does. The parameters are
        processed once."""
        params = copy(params or self.default_params)
        options = options or {}
        if self._encoder_decoder is not None:
            read = partial(self._encoder_decoder.read, params=params)
            rendered = (RenderedPrompt(*self._render(read, prompt)) for prompt in prompts)
        else:
            render = self.renderer.render_prompt
            salt = options.get("cache_salt")
            rendered = (self._rendered(render, prompt, text_of(prompt), salt) for prompt in prompts)
        return self.prepare_rendered(request_ids, rendered, params, self.inputs(params), options)

    def prepare_chat(
        self,
        request_id: str,
        messages: Conversation,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **render_options: Any,
    ) -> PreparedRequest:
        """Makes a request from a conversation, with the chat template. `render_options` are
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
        """Makes requests from conversations that share parameters, as `prepare_chat` does. The
        parameters are processed once."""
        params = copy(params or self.default_params)
        options = options or {}
        if self._encoder_decoder is not None:
            read = partial(self._encoder_decoder.read_conversation, params=params, **render_options)
            rendered = (RenderedPrompt(*self._render(read, chat)) for chat in conversations)
        else:
            render = self.renderer.render_conversation
            salt = options.get("cache_salt")
            rendered = (
                self._rendered(render, chat, None, salt, **render_options) for chat in conversations
            )
        return self.prepare_rendered(request_ids, rendered, params, self.inputs(params), options)

    def _render(
        self, render: Callable[..., ResultT], source: Any, **render_options: Any
    ) -> ResultT:
        try:
            return render(source, **render_options)
        except Exception as error:
            self.plugins.boundary.check(error)
            raise

    def _rendered(
        self,
        render: Callable[..., Rendered],
        source: Any,
        text: str | None,
        salt: str | None,
        **render_options: Any,
    ) -> RenderedPrompt:
        if self.renderer.rules is None:
            rendered = self._render(render, source, **render_options)
            return RenderedPrompt(rendered.token_ids, text, features=rendered.features)
        rendering = self.rendering(render, source, salt, **render_options)
        return self.rendered_by(rendering, rendering(), text)

    def rendering(
        self, render: Callable[..., Rendered], source: Any, salt: str | None, **render_options: Any
    ) -> PinnedRendering:
        """Rendering of a prompt or a conversation by a method of the renderer, for now and for
        `render_again`."""
        return PinnedRendering(partial(self._render, render, source, **render_options), salt)

    def rendered_by(
        self, rendering: PinnedRendering, rendered: Rendered, text: str | None
    ) -> RenderedPrompt:
        """Makes a rendered prompt from the result of `rendering`. `text`: the prompt's own text, if
        it is one."""
        is_held = rendered.features and self.renderer.feature_cache is not None
        return RenderedPrompt(
            rendered.token_ids,
            text,
            features=rendered.features,
            rendering=rendering if is_held else None,
        )

    def render_again(self, prepared: PreparedRequest) -> None:
        """Adds the data of items that the engine no longer holds, by rendering again. Raises
        RequestError."""
        assert prepared.rendering is not None, "it has items of media"
        rendered = prepared.rendering()
        features = prepared.message.features
        again = rendered.features or []
        with self.plugins.boundary:
            check_features(again, rendered.token_ids, self.renderer, prepared.rendering.found)
        if [item.mm_identifier for item in again] != [item.mm_identifier for item in features]:
            raise RequestError(
                "the prompt's media changed between two readings.",
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
        """The last part of `prepare_batch`. `inputs` belong to `params`, and nothing else refers to
        them."""
        return [
            self._prepared(request_id, prompt, params, inputs, options)
            for request_id, prompt in zip(request_ids, rendered, strict=True)
        ]

    def inputs(self, params: SamplingParams) -> SequenceInputs:
        """Runner inputs from sampling parameters, which are checked. Raises RequestError."""
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
                    name: value
                    for name, value in arguments.items()
                    if not registry.get(name).for_model
                },
                model_arguments={
                    name: value for name, value in arguments.items() if registry.get(name).for_model
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
        if inputs.logits_processors or inputs.model_arguments:
            arguments = {**inputs.logits_processors, **inputs.model_arguments}
            # A part reports errors of its arguments itself.
            for name in self.parts.by_name:
                arguments.pop(name, None)
            message.cache_keys += self._keys_of(arguments)
        if features:
            add_features(message, features, token_ids, self.renderer.rules)
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
        if self.parts.prepares:
            self.parts.prepare(message)
        scope = options.get("stop_scope")
        return PreparedRequest(message, text, rendered.encoder_text, rendered.rendering, scope)

    def _keys_of(self, arguments: dict[str, dict[str, Any]]) -> list[CacheKey]:
        """Cache key of what plugins' parameters change in the forward pass. A client's salt cannot
        equal it: salts cover one token."""
        key = self.plugins.logits_processors.cache_key(arguments)
        return [] if key is None else [CacheKey(0, 2, key)]

    def _message(
        self, request_id: str, token_ids: list[int], params: SamplingParams, options: RequestOptions
    ) -> EngineRequest:
        if not isinstance(request_id, str):
            raise RequestError(
                f"a request id must be a text, not a {type(request_id).__name__}.", "request_id"
            )
        if options:
            if not self.parts.keywords.keys().isdisjoint(options):
                options = self.parts.with_context(options)
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


def text_of(prompt: Any) -> str | None:
    """Text of a prompt that is a text, or has one; otherwise None."""
    if isinstance(prompt, str):
        return prompt
    return prompt.get("prompt") if hasattr(prompt, "get") else None
