"""The pooling methods of `LLM`: embed, classify, score, rerank, encode."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.errors import RequestError, nearest
from toolkit_lm.frontend.llm_engine import LLMEngine
from toolkit_lm.outputs import PoolingRequestOutput, RerankResult
from toolkit_lm.pooling import Scoring, TextOptions
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing.pooling_requests import all_prepared, params_of_each
from toolkit_lm.processing.processor import Processor
from toolkit_lm.processing.requests import PreparedRequest, RequestOptions
from toolkit_lm.prompts import Prompt, Scored, TextPair, listed

Progress = Callable[[int, int], None]
"""Called with (finished requests, all requests)."""
Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None
"""Pooling parameters: for all prompts, or one per prompt."""


class ScoreOptions(TypedDict, total=False):
    """Options of `score` and `rerank`."""

    truncate_prompt_tokens: int | None
    """Truncates longer prompts to this many tokens (-1: to the model's limit). Without it they are
    an error."""
    instruction: str | None
    """Instruction, for rerankers that take one."""
    cache_salt: str | None
    """Only requests of the same salt share cached prefixes."""
    use_tqdm: bool
    """Whether to show a progress bar, in a terminal. Default: True."""
    progress: Progress | None
    """Called with (finished prompts, all prompts), in place of the bar."""


class EncodeOptions(ScoreOptions, total=False):
    """Options of `encode`, `embed` and `classify`."""

    prompt_name: str | Sequence[str | None] | None
    """Name of a checkpoint's prompt ("query", "document") that is put before each text; or one name
    per text."""
    names: Sequence[str] | None
    """Names of the prompts in errors."""


class NoOptions(TypedDict):
    """Keywords that a type checker refuses, but that are accepted if they are None."""


class PoolingMixin(ABC):
    """The pooling half of LLM. Each call is checked as a whole before anything is computed."""

    engine: LLMEngine

    def encode(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        pooling_params: Params = None,
        *,
        pooling_task: PoolingTask | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput]:
        """Runs any pooling task of the model, and returns raw results. `pooling_task` applies to
        params that name none.

        Raises RequestError for a bad prompt or a task that the model does not serve.
        """
        self._check_names(self.encode, options, EncodeOptions)
        many = listed(prompts)
        ids = [self._next_id() for _ in many]
        prepared = prepared_for_pooling(
            self.engine.processor,
            ids,
            many,
            pooling_params,
            {**options, "pooling_task": pooling_task},
        )
        outputs = self._run(prepared, options.get("use_tqdm", True), options.get("progress"))
        found = {output.request_id: output for output in outputs}
        return [found[request_id] for request_id in ids]

    def embed(
        self, prompts: Prompts, pooling_params: Params = None, **options: Unpack[EncodeOptions]
    ) -> list[PoolingRequestOutput]:
        """Returns one vector per prompt."""
        self._check_names(self.embed, options, EncodeOptions)
        return self.encode(no_pair(prompts), pooling_params, pooling_task="embed", **options)

    def classify(
        self, prompts: Prompts, pooling_params: Params = None, **options: Unpack[EncodeOptions]
    ) -> list[PoolingRequestOutput]:
        """Returns the probabilities of the model's labels, for each prompt."""
        self._check_names(self.classify, options, EncodeOptions)
        return self.encode(no_pair(prompts), pooling_params, pooling_task="classify", **options)

    def reward(
        self, prompts: Prompts, pooling_params: Params = None, **options: Unpack[EncodeOptions]
    ) -> list[PoolingRequestOutput]:
        """Returns a reward model's rewards for each prompt: one for each token, or for each
        step."""
        self._check_names(self.reward, options, EncodeOptions)
        return self.encode(
            no_pair(prompts), pooling_params, pooling_task="token_classify", **options
        )

    def score(
        self,
        data_1: Scored | Sequence[Scored],
        data_2: Scored | Sequence[Scored],
        pooling_params: PoolingParams | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[PoolingRequestOutput]:
        """Scores how well texts of `data_2` fit those of `data_1`: one query with each document, or
        as many queries as documents, pair by pair.

        A cross-encoder reads both texts together. An embedding model's score is the cosine, or the
        similarity that its files state. A late-interaction model's score is the sum of the best
        products of token embeddings.
        """
        self._check_names(self.score, options, ScoreOptions)
        return self._score(
            self.engine.processor.pooling.scoring(data_1, data_2, ("data_1", "data_2")),
            pooling_params,
            options,
        )

    def rerank(
        self,
        query: Scored,
        documents: Sequence[Scored],
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[RerankResult]:
        """Ranks documents by how well they fit the query, best first. Documents that could not be
        scored come last, with their errors."""
        self._check_names(self.rerank, options, ScoreOptions)
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise RequestError(f"top_n must be an integer of at least 1, not {top_n!r}.", "top_n")
        if not isinstance(query, str | Mapping):
            raise RequestError(f"query must be a text, not a {type(query).__name__}.", "query")
        scoring = self.engine.processor.pooling.scoring(query, documents, ("query", "documents"))
        scores = self._score(scoring, pooling_params, options)
        texts = [documents] if isinstance(documents, str | Mapping) else documents
        results = [
            RerankResult(index, output.outputs.score, text, output.error)
            for index, (output, text) in enumerate(zip(scores, texts, strict=True))
        ]
        return sorted(
            results,
            key=lambda result: math.inf if result.error is not None else -result.relevance_score,
        )[:top_n]

    def _score(
        self, scoring: Scoring, params: PoolingParams | None, options: ScoreOptions
    ) -> list[PoolingRequestOutput]:
        each = scoring.params(params)
        try:
            outputs = self.encode(
                scoring.prompts,
                each,
                prompt_name=scoring.prompt_names,
                names=scoring.names,
                **options,
            )
        except RequestError as error:
            raise scoring.culprit(error) from None
        return scoring.scores(outputs)

    def _check_names(
        self, method: Callable[..., object], options: Mapping[str, object], kind: type
    ) -> None:
        keywords = self.engine.processor.parts.keywords
        check_names(method, options, {*kind.__annotations__, *keywords})

    @abstractmethod
    def _next_id(self) -> str: ...

    @abstractmethod
    def _run(
        self, prepared: list[PreparedRequest], use_tqdm: bool, progress: Progress | None
    ) -> list[Any]: ...


def prepared_for_pooling(
    processor: Processor,
    request_ids: Sequence[str],
    prompts: Sequence[Prompt | TextPair],
    params: Params,
    options: Mapping[str, Any],
) -> list[PreparedRequest]:
    """Returns requests in the best order for computing. `options`: those of `encode`, with
    "pooling_task".

    Raises RequestError for the first bad prompt.
    """

    def of(kind: type) -> Any:
        return {name: options[name] for name in kind.__annotations__.keys() & options.keys()}

    each = params_of_each(params, options.get("pooling_task"), len(prompts), processor.tasks)
    contexts, _ = processor.parts.contexts(options, len(prompts))
    prepared = processor.pooling.prepare_batch(
        request_ids, prompts, each, of(RequestOptions), contexts=contexts, **of(TextOptions)
    )
    names = options.get("names") or [f"prompt {index}" for index in range(len(prepared))]
    # Sequences of equal length that meet in a step are computed together.
    return sorted(
        all_prepared(prepared, names), key=lambda entry: len(entry.message.prompt_token_ids)
    )


def check_names(
    method: Callable[..., object],
    options: Mapping[str, object],
    known: Collection[str] = (),
    *,
    only_near: bool = False,
) -> None:
    """Raises TypeError for a keyword that `method` does not take, unless its value is None.
    `known`: the keywords of its `**options`.

    `only_near`: only if `method` takes a keyword of a similar name.
    """
    own = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    for name in options.keys() - known:
        if options[name] is not None:
            of_params = name in PoolingParams.__struct_fields__ and name != "task"
            near = nearest(name, [*own, *known], otherwise="" if only_near else None)
            if only_near and not near:
                continue
            way_out = f"Give PoolingParams({name}={options[name]!r})." if of_params else near
            raise TypeError(f"LLM.{method.__name__}() takes no {name!r}. {way_out}")


def no_pair(prompts: Prompts) -> Prompts:
    """Converts a tuple to a list of prompts, for calls in which a pair is not a prompt."""
    return list(prompts) if isinstance(prompts, tuple) else prompts
