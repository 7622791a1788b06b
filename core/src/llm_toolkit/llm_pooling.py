"""What `LLM` does with pooling models: embed, classify, score, rerank, encode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llm_toolkit.config.tasks import PoolingTask
from llm_toolkit.engine import LLMEngine, PreparedRequest
from llm_toolkit.engine.pooling_batch import all_prepared, prepare_each
from llm_toolkit.engine.scoring import Scoring
from llm_toolkit.errors import RequestError
from llm_toolkit.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
)
from llm_toolkit.pooling_params import PoolingParams
from llm_toolkit.prompts import Prompt, TextPair

Progress = Callable[[int, int], None]


class PoolingFace(ABC):
    """The pooling half of LLM. What one call asks is checked as a whole before anything is computed."""

    engine: LLMEngine

    def encode(
        self,
        prompts: Prompt | TextPair | Sequence[Prompt | TextPair],
        params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        task: PoolingTask | None = None,
        prompt_name: str | Sequence[str | None] | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        names: Sequence[str] | None = None,
        use_tqdm: bool = True,
        progress: Progress | None = None,
    ) -> list[PoolingRequestOutput]:
        """Any pooling task of the model, raw. `task` stands in for params that say nothing else.

        `prompt_name` names one of the checkpoint's prompts ("query", "document"), which goes before each text; or one for each.
        `truncate_prompt_tokens` cuts longer texts (-1: to what the model can take); without it they are an error.
        `names` are what errors call the prompts.
        Raises RequestError for a bad prompt or a task that the model does not serve.
        """
        if not isinstance(prompts, str | Mapping | Sequence):
            raise RequestError(
                f"prompts must be a text, a dict, a pair of texts or a list of these, not a {type(prompts).__name__}.", "prompt"
            )
        many = [prompts] if isinstance(prompts, str | Mapping | tuple) else list(prompts)
        each = self._pooling_params(params, task, len(many))
        prepared = prepare_each(
            self.engine,
            [self._next_id() for _ in many],
            many,
            each,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
            instruction=instruction,
        )
        ready = all_prepared(prepared, names or [f"prompt {index}" for index in range(len(many))])
        # Sequences of equal length that meet in a step are computed together.
        order = sorted(range(len(ready)), key=lambda i: len(ready[i].message.prompt_token_ids))
        outputs = self._run([ready[i] for i in order], use_tqdm, progress)
        by_place = dict(zip(order, outputs, strict=True))
        return [by_place[i] for i in range(len(ready))]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None = None, **options: Any
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt. `options` are those of `encode`."""
        return [EmbeddingRequestOutput.of(output) for output in self.encode(_no_pair(prompts), params, task="embed", **options)]

    def classify(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | Sequence[PoolingParams] | None = None, **options: Any
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's labels, for each prompt. `options` are those of `encode`."""
        return [ClassificationRequestOutput.of(output) for output in self.encode(_no_pair(prompts), params, task="classify", **options)]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        use_tqdm: bool = True,
        progress: Progress | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well documents fit queries: one query with each document, or as many queries as documents, pair by pair.

        A cross-encoder reads both texts together; of an embedding model it is the cosine; of a late-interaction model the sum of the
        best products of token embeddings. `instruction` is for rerankers that take one.
        """
        scoring = Scoring(queries, documents, self.engine.tasks, self.engine.texts.prompts)
        outputs = self.encode(
            scoring.prompts,
            params,
            task=scoring.task,
            prompt_name=scoring.prompt_names,
            names=scoring.names,
            truncate_prompt_tokens=truncate_prompt_tokens,
            instruction=instruction,
            use_tqdm=use_tqdm,
            progress=progress,
        )
        return scoring.scores(outputs)

    def rerank(self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any) -> list[RerankResult]:
        """The documents by how well they fit the query, best first. `options` are those of `score`."""
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise RequestError(f"top_n must be an integer of at least 1, not {top_n!r}.", "top_n")
        if not isinstance(query, str):
            raise RequestError(f"query must be a text, not a {type(query).__name__}.", "query")
        documents = [documents] if isinstance(documents, str) else documents
        scores = self.score(query, documents, **options)
        failed = next((output for output in scores if output.error is not None), None)
        if failed is not None:
            raise RequestError(f"a document could not be scored: {failed.error}", "documents")
        results = [RerankResult(i, output.score, text) for i, (output, text) in enumerate(zip(scores, documents, strict=True))]
        return sorted(results, key=lambda result: -result.relevance_score)[:top_n]

    def _pooling_params(
        self, params: PoolingParams | Sequence[PoolingParams] | None, task: PoolingTask | None, count: int
    ) -> list[PoolingParams]:
        if params is None:
            if task is None:
                raise RequestError(f"which task? This model serves: {', '.join(self.engine.tasks)}.", "task")
            return [PoolingParams(task=task)] * count
        each = [params] * count if isinstance(params, PoolingParams) else params
        if not isinstance(each, list | tuple) or len(each) != count or not all(isinstance(one, PoolingParams) for one in each):
            raise RequestError(f"give PoolingParams, or a list of {count} of them, one for each prompt.", "params")
        return [one if task is None else one.replace(task=task) for one in each]

    @abstractmethod
    def _next_id(self) -> str: ...

    @abstractmethod
    def _run(self, prepared: list[PreparedRequest], use_tqdm: bool, progress: Progress | None) -> list[Any]: ...


def _no_pair(prompts: Prompt | Sequence[Prompt]) -> Prompt | Sequence[Prompt]:
    """A tuple is as many prompts as it has items, and not one pair, where a pair is no prompt."""
    return list(prompts) if isinstance(prompts, tuple) else prompts
