"""The PoolingProcessor: converts texts, token ids and pairs of texts to requests that pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.messages import EngineRequest, SequenceInputs
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import PoolingInputs, Scoring, TextOptions
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.limits import RequestLimits
from toolkit_lm.processing.multimodal import add_features, check_features
from toolkit_lm.processing.parts import RequestParts
from toolkit_lm.processing.pinned_rendering import PinnedRendering
from toolkit_lm.processing.requests import PreparedRequest, RequestOptions
from toolkit_lm.processing.validation import check_options, check_token_ids
from toolkit_lm.prompts import Prompt, Scored, TextPair, check_count
from toolkit_lm.renderer import Rendered, RenderedText, Renderer

_NO_INPUTS = "no loaded plugin reads the texts of pooling requests."
_NO_SAMPLING = SamplingParams()
"""Shared by all pooling requests; constructing SamplingParams is slow."""


class PoolingProcessor:
    """Renders and checks texts and pairs of texts for pooling, each of them once.

    One instance serves all requests of an engine, from several threads. Its methods raise
    RequestError, which names the parameter.
    """

    def __init__(
        self,
        config: VllmConfig,
        renderer: Renderer,
        plugins: Plugins,
        parts: RequestParts,
        vocab_size: int,
        make_request: Callable[..., EngineRequest],
    ) -> None:
        """`config` is resolved. `limits` must be set before the first request. `make_request`:
        makes one from an id, token ids, sampling parameters and options, which it checks."""
        self._texts = _pooling_inputs(config, renderer, plugins)
        self._renderer = renderer
        self._boundary = plugins.boundary
        self._parts = parts
        self._vocab_size = vocab_size
        self._make_request = make_request
        self.limits: RequestLimits | None = None
        """Limits of the engine, once it is ready."""

    @property
    def texts(self) -> PoolingInputs:
        """Reader of the texts. Raises RequestError if the engine only generates and has none."""
        if self._texts is None:
            raise RequestError(_NO_INPUTS, "task")
        return self._texts

    def prepare_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[Prompt | TextPair],
        params: Sequence[PoolingParams],
        options: RequestOptions | None = None,
        *,
        contexts: Sequence[Mapping[str, str]] = (),
        **text_options: Unpack[TextOptions],
    ) -> list[PreparedRequest | RequestError]:
        """Makes a request from each prompt, or pair of texts, or the error for which it cannot be
        one. `params` has one entry per prompt. `contexts`, of which there may be as many: added to
        the context of `options`.

        Raises RequestError for an error that concerns all of them.
        """
        options = options or {}
        check_options(options)
        check_count(request_ids, "request_ids", len(prompts))
        for distinct in {id(request_params): request_params for request_params in params}.values():
            self.check(distinct)
        rendered = self.texts.render(prompts, **text_options)
        prepared: list[PreparedRequest | RequestError] = []
        now = time.monotonic()
        contexts = contexts or [{}] * len(prompts)
        for request_id, text, prompt, request_params, context in zip(
            request_ids, rendered, prompts, params, contexts, strict=True
        ):
            try:
                if isinstance(text, RequestError):
                    raise text
                own = options
                if context:
                    own = {**options, "context": {**options.get("context", {}), **context}}
                prepared_request = self._prepared(request_id, text, prompt, request_params, own)
                # They arrive together, so they are served in the order in which they are submitted.
                prepared_request.message.arrival_time = now
                prepared.append(prepared_request)
            except RequestError as error:
                prepared.append(error)
        return prepared

    def check(self, params: PoolingParams) -> None:
        """Raises RequestError for a task that the model does not serve, or parameters that the task
        does not support."""
        size = self._limits.rules(params.task).size
        if size is not None:
            self.texts.check(params, size)

    def scoring(
        self,
        queries: Scored | Sequence[Scored],
        documents: Scored | Sequence[Scored],
        fields: tuple[str, str] = ("queries", "documents"),
    ) -> Scoring:
        """Pairs one query with all documents, or one query with each. `fields` are the names of the
        two in errors. Raises RequestError."""
        tasks = () if self.limits is None else self.limits.tasks
        return self.texts.scoring(queries, documents, tasks, fields)

    def _prepared(
        self,
        request_id: str,
        rendered: RenderedText,
        prompt: Prompt | TextPair,
        params: PoolingParams,
        options: RequestOptions,
    ) -> PreparedRequest:
        check_token_ids(rendered.token_ids, self._vocab_size)
        features = []
        if rendered.features or self._renderer.rules is not None:
            # Items are sent whole, also those that the engine holds: nothing pins them here.
            made = Rendered(rendered.token_ids, rendered.features)
            features = PinnedRendering(lambda: made, options.get("cache_salt"))().features or []
            with self._boundary:
                check_features(features, rendered.token_ids, self._renderer, {})
        if params.step_tag_id is not None:
            check_token_ids([params.step_tag_id], self._vocab_size, "step_tag_id")
        message = self._make_request(request_id, rendered.token_ids, _NO_SAMPLING, options)
        message.inputs = SequenceInputs(
            pooling=params,
            second_text_start=rendered.second_text_start,
            pooling_start=rendered.pooling_start if params.task == "embed" else 0,
            num_attended=rendered.num_attended,
        )
        add_features(message, features, rendered.token_ids, self._renderer.rules)
        rules = self._limits.rules(params.task)
        message.chunkable = rules.chunkable
        message.reads_prefix_cache = rules.reads_prefix_cache
        # A pooler's state of a sequence between its chunks is lost with its row.
        message.draws_tokens = message.swappable = False
        self._limits.check(message)
        if self._parts.prepares:
            self._parts.prepare(message)
        return PreparedRequest(message, prompt if isinstance(prompt, str) else None)

    @property
    def _limits(self) -> RequestLimits:
        assert self.limits is not None, "the engine is not ready: call wait_ready first"
        return self.limits


def _pooling_inputs(
    config: VllmConfig, renderer: Renderer, plugins: Plugins
) -> PoolingInputs | None:
    """Makes the reader of pooling texts; None: the engine does not pool. Raises ConfigError."""
    # mypy: an abstract class stands for those that are made.
    kind: Any = PoolingInputs
    found: PoolingInputs | None = plugins.pooling_inputs.first_result(
        kind, config, renderer, plugins
    )
    if found is None and (config.model.runner == "pooling" or config.model.extra_tasks):
        raise ConfigError(f"{_NO_INPUTS} {plugins.pooling_inputs.way_out}".rstrip())
    return found
