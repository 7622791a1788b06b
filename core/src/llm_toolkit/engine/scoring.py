"""How well texts fit together, with whatever the model is made for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum

import numpy as np

from llm_toolkit.config.tasks import PoolingTask, Task
from llm_toolkit.errors import RequestError
from llm_toolkit.outputs import PoolingRequestOutput, ScoringRequestOutput
from llm_toolkit.prompts import TextPair


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Of two embeddings [D]: a bi-encoder's score, from -1 to 1. 0 where one of them has no length."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return min(max(float(first @ second) / lengths, -1.0), 1.0) if lengths else 0.0


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Of two texts' token embeddings [tokens, D]: a late-interaction score (Khattab and Zaharia 2020).

    For each token of the query the dot product with the document's token that fits best, summed.
    """
    return float((query @ document.T).max(axis=1).sum())


class ScoreKind(Enum):
    """What a model's score is made of."""

    CROSS_ENCODER = "cross-encoder"
    BI_ENCODER = "bi-encoder"
    LATE_INTERACTION = "late interaction"


def score_kind(tasks: Collection[Task]) -> ScoreKind:
    """How a model that serves `tasks` scores. Raises RequestError when it cannot."""
    if "score" in tasks:
        return ScoreKind.CROSS_ENCODER
    if "embed" in tasks:
        return ScoreKind.BI_ENCODER
    if "token_embed" in tasks:
        # A model that embeds tokens only is made for this.
        return ScoreKind.LATE_INTERACTION
    raise RequestError(f"this model does not score texts. Supported: {', '.join(tasks)}.", "task")


_TASKS: dict[ScoreKind, PoolingTask] = {
    ScoreKind.CROSS_ENCODER: "score",
    ScoreKind.BI_ENCODER: "embed",
    ScoreKind.LATE_INTERACTION: "token_embed",
}
_SIDES = ("query", "document")


class Scoring:
    """Pairs of texts to be scored: what the engine is to compute for them, and what comes of it.

    A cross-encoder reads each pair. Other models read each distinct text once, queries and documents with the prompts that the
    checkpoint has for them.
    """

    def __init__(
        self, queries: str | Sequence[str], documents: str | Sequence[str], tasks: Collection[Task], prompts: Collection[str]
    ) -> None:
        """One query for all documents, or one for each. `tasks`: those of the model. `prompts`: the names of the checkpoint's.

        Raises RequestError.
        """
        self.kind = score_kind(tasks)
        self.task = _TASKS[self.kind]
        pairs = _pairs(queries, documents)
        self.prompts: list[str | TextPair]
        """What the engine is to read."""
        self.prompt_names: list[str | None]
        """The name of the checkpoint's prompt that goes before each."""
        self.names: list[str]
        """What errors call each."""
        if self.kind is ScoreKind.CROSS_ENCODER:
            self.prompts = list(pairs)
            self.prompt_names = [None] * len(pairs)
            self.names = [f"documents[{number}]" for number in range(len(pairs))]
            return
        first: dict[tuple[int, str], str] = {}
        for number, pair in enumerate(pairs):
            for side, where in enumerate(("queries", "documents")):
                first.setdefault((side, pair[side]), f"{where}[{number}]")
        places = {key: place for place, key in enumerate(first)}
        self._places = [(places[0, query], places[1, document]) for query, document in pairs]
        self.prompts = [text for _, text in first]
        self.prompt_names = [_SIDES[side] if _SIDES[side] in prompts else None for side, _ in first]
        self.names = list(first.values())

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """One for each pair, of what the engine gave for `prompts`."""
        if self.kind is ScoreKind.CROSS_ENCODER:
            return [ScoringRequestOutput.of(output) for output in outputs]
        return [self._score(outputs[query], outputs[document]) for query, document in self._places]

    def _score(self, query: PoolingRequestOutput, document: PoolingRequestOutput) -> ScoringRequestOutput:
        score = float("nan")
        if query.data is not None and document.data is not None:
            score = (cosine if self.kind is ScoreKind.BI_ENCODER else max_sim)(query.data, document.data)
        return ScoringRequestOutput(document.request_id, score, document.num_cached_tokens, query.error or document.error)


def _pairs(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[TextPair]:
    queries, documents = _texts(queries, "queries"), _texts(documents, "documents")
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        raise RequestError(f"{len(queries)} queries for {len(documents)} documents: give one query, or one for each document.", "queries")
    return list(zip(queries, documents, strict=True))


def _texts(given: str | Sequence[str], param: str) -> list[str]:
    if isinstance(given, str):
        return [given]
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise RequestError(f"{param} must be a text, or a list of texts.", param)
    return list(given)
