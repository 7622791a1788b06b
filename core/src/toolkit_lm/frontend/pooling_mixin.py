"""What `LLM` does with pooling models: embed, classify, score, rerank, encode."""

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
from toolkit_lm.prompts import Prompt, TextPair, listed

Progress = Callable[[int, int], None]
"""Called with (finished requests, all requests)."""
Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None
"""For all prompts, or one for each."""


class ScoreOptions(TypedDict, total=False):
    """How `score` and `rerank` treat texts."""

    truncate_prompt_tokens: int | None
    """Cut longer prompts to so many tokens (-1: to what the model can take). Without it they are an
    error."""
    instruction: str | None
    """For rerankers that take one."""
    cache_salt: str | None
    """Only requests of the same salt share cached prefixes."""
    use_tqdm: bool
    """Show a bar, in a terminal. True where not given."""
    progress: Progress | None
    """Called with (finished prompts, all prompts), in place of the bar."""


class EncodeOptions(ScoreOptions, total=False):
    """How `encode`, `embed` and `classify` treat prompts."""

    prompt_name: str | Sequence[str | None] | None
    """One of the checkpoint's prompts ("query", "document"), which goes before each text; or one
    for each."""
    names: Sequence[str] | None
    """What errors call the prompts."""


class NoOptions(TypedDict):
    """For keywords that a type checker refuses, and that are taken where they ask for nothing."""


class PoolingMixin(ABC):
    """The pooling half of LLM. What one call asks is checked as a whole before anything is
    computed."""

    engine: LLMEngine

    def encode(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        pooling_params: Params = None,
        *,
        pooling_task: PoolingTask | None = None,
        **options: Unpack[EncodeOptions],
    ) -> list[PoolingRequestOutput]:
        """Any pooling task of the model, raw. `pooling_task` stands in for params that say nothing
        else.

        Raises RequestError for a bad prompt or a task that the model does not serve.
        """
        check_names(self.encode, options, EncodeOptions.__annotations__)
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
        """One vector for each prompt."""
        check_names(self.embed, options, EncodeOptions.__annotations__)
        return self.encode(no_pair(prompts), pooling_params, pooling_task="embed", **options)

    def classify(
        self, prompts: Prompts, pooling_params: Params = None, **options: Unpack[EncodeOptions]
    ) -> list[PoolingRequestOutput]:
        """The probabilities of the model's labels, for each prompt."""
        check_names(self.classify, options, EncodeOptions.__annotations__)
        return self.encode(no_pair(prompts), pooling_params, pooling_task="classify", **options)

    def reward(
        self, prompts: Prompts, pooling_params: Params = None, **options: Unpack[EncodeOptions]
    ) -> list[PoolingRequestOutput]:
        """What a reward model gives for each prompt: a reward for each token, or for each step."""
        check_names(self.reward, options, EncodeOptions.__annotations__)
        return self.encode(
            no_pair(prompts), pooling_params, pooling_task="token_classify", **options
        )

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[PoolingRequestOutput]:
        """How well texts of `data_2` fit those of `data_1`: one query with each document, or as
        many queries as documents, pair by pair.

        A cross-encoder reads both texts together; of an embedding model it is the cosine, or what
        its files say; of a late-interaction model the sum of the best products of token embeddings.
        """
        check_names(self.score, options, ScoreOptions.__annotations__)
        return self._score(
            self.engine.processor.scoring(data_1, data_2, ("data_1", "data_2")),
            pooling_params,
            options,
        )

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[RerankResult]:
        """The documents by how well they fit the query, best first. Those that could not be scored
        come last, with their errors."""
        check_names(self.rerank, options, ScoreOptions.__annotations__)
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise RequestError(f"top_n must be an integer of at least 1, not {top_n!r}.", "top_n")
        if not isinstance(query, str):
            raise RequestError(f"query must be a text, not a {type(query).__name__}.", "query")
        scoring = self.engine.processor.scoring(query, documents, ("query", "documents"))
        scores = self._score(scoring, pooling_params, options)
        texts = [documents] if isinstance(documents, str) else documents
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
    """Requests in the order in which they are best computed. `options`: those of `encode`, with
    "pooling_task".

    Raises RequestError for the first bad prompt.
    """

    def of(kind: type) -> Any:
        return {name: options[name] for name in kind.__annotations__.keys() & options.keys()}

    each = params_of_each(params, options.get("pooling_task"), len(prompts), processor.tasks)
    prepared = processor.prepare_pooling_batch(
        request_ids, prompts, each, of(RequestOptions), **of(TextOptions)
    )
    names = options.get("names") or [f"prompt {index}" for index in range(len(prepared))]
    # Sequences of equal length that meet in a step are computed together.
    return sorted(all_prepared(prepared, names), key=lambda one: len(one.message.prompt_token_ids))


def check_names(
    method: Callable[..., object],
    options: Mapping[str, object],
    known: Collection[str] = (),
    *,
    only_near: bool = False,
) -> None:
    """Raises TypeError for a keyword that `method` does not take, unless it asks for nothing.
    `known`: those of its `**options`.

    `only_near`: only where it takes one of a similar name.
    """
    own = [
        one.name
        for one in inspect.signature(method).parameters.values()
        if one.kind is not one.VAR_KEYWORD
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
    """A tuple is as many prompts as it has items, and not one pair, where a pair is no prompt."""
    return list(prompts) if isinstance(prompts, tuple) else prompts
