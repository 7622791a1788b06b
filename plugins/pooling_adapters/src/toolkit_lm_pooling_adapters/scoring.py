"""How well texts fit together, with whatever the model is made for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from toolkit_lm.config import PoolingTask, Task, way_to_serve
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.outputs import PoolingOutput, PoolingRequestOutput
from toolkit_lm.pooling import Scoring
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.prompts import Scored
from toolkit_lm.renderer import Renderer

from toolkit_lm_pooling_adapters.late_interaction import LateInteractionRole
from toolkit_lm_pooling_adapters.media import has_media


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Cosine similarity of two embeddings [D], from -1 to 1: a bi-encoder's score. 0 if one of them
    has length 0."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(first) * np.linalg.norm(second))
    return min(max(float(first @ second) / lengths, -1.0), 1.0) if lengths else 0.0


def dot(first: np.ndarray, second: np.ndarray) -> float:
    """Dot product of two embeddings [D]."""
    return float(first.astype(np.float64) @ second.astype(np.float64))


def euclidean(first: np.ndarray, second: np.ndarray) -> float:
    """Negated distance of two embeddings [D]: at most 0, and greater for nearer ones."""
    return -float(np.linalg.norm(first.astype(np.float64) - second.astype(np.float64)))


def manhattan(first: np.ndarray, second: np.ndarray) -> float:
    """Negated sum of the distances of two embeddings [D] in each dimension."""
    return -float(np.abs(first.astype(np.float64) - second.astype(np.float64)).sum())


SIMILARITIES: Mapping[str, Callable[[np.ndarray, np.ndarray], float]] = MappingProxyType(
    {"cosine": cosine, "dot": dot, "euclidean": euclidean, "manhattan": manhattan}
)
"""How bi-encoders compare, by sentence-transformers' names and definitions."""


_NO_TOKENS = -1e9
"""Score in sentence-transformers of a document without compared tokens."""


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Late-interaction score of two texts' token embeddings [tokens, D] (Khattab and Zaharia 2020).

    For each token of the query, the largest dot product with a token of the document; these are
    summed. A document without tokens gets the lowest score."""
    return float((query @ document.T).max(axis=1).sum()) if len(document) else _NO_TOKENS


def mean_max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """`max_sim` divided by the number of the query's tokens."""
    return max_sim(query, document) / max(len(query), 1)


class ScoreKind(Enum):
    """Method by which a model scores pairs."""

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
    # With one label it would serve "score" too.
    why = (
        ": its classifier has several labels, and a score needs one" if "classify" in tasks else ""
    )
    way_out = (
        f" {way_to_serve('embed')} Rerankers: convert='classify'." if "generate" in tasks else ""
    )
    raise RequestError(
        f"this model does not score texts{why}. Supported: {', '.join(tasks)}.{way_out}", "task"
    )


_TASKS: dict[ScoreKind, PoolingTask] = {
    ScoreKind.CROSS_ENCODER: "score",
    ScoreKind.BI_ENCODER: "embed",
    ScoreKind.LATE_INTERACTION: "token_embed",
}
_ROLES = ("query", "document")


_ALONE = (str, Mapping)
"""Types of what stands alone where a list may stand."""


class ScoredTexts(Protocol):
    """How the texts of a model are read and compared. `PoolingInputProcessor` is one."""

    similarity: str
    """A key of `SIMILARITIES`."""
    averages: bool
    """Whether late interaction averages the best products of a query's tokens."""
    scored_normalized: bool | None
    """Whether embeddings that are compared have length 1. None: as those of other requests."""
    roles: dict[str, LateInteractionRole]
    prompts: dict[str, str]
    """The checkpoint's prompts, by name."""
    max_tokens: int
    """Tokens that a text may have."""
    renderer: Renderer

    @property
    def takes_media_pairs(self) -> bool:
        """Whether a pair for a cross-encoder may have media."""


class TextScoring(Scoring):
    """Pairs of texts to be scored: what the engine is to compute for them, and what comes of it.

    A cross-encoder reads each pair. Other models read each distinct text once, queries and
    documents with the prompts that the checkpoint has for them.
    """

    def __init__(
        self,
        queries: Scored | Sequence[Scored],
        documents: Scored | Sequence[Scored],
        tasks: Collection[Task],
        texts: ScoredTexts,
        *,
        fields: tuple[str, str] = ("queries", "documents"),
    ) -> None:
        """One query for all documents, or one for each. `tasks` and `texts`: those of the model.
        `fields`: what errors call the two.

        Raises RequestError.
        """
        self.kind = score_kind(tasks)
        self.task = _TASKS[self.kind]
        is_late = self.kind is ScoreKind.LATE_INTERACTION
        self._compare = SIMILARITIES[texts.similarity]
        if is_late:
            self._compare = mean_max_sim if texts.averages else max_sim
        self._roles: Mapping[str, LateInteractionRole] = texts.roles if is_late else {}
        self._normalize = texts.scored_normalized if self.kind is ScoreKind.BI_ENCODER else None
        pairs = _pairs(queries, documents, fields)
        if self.kind is ScoreKind.CROSS_ENCODER and not texts.takes_media_pairs:
            _check_texts(pairs, fields)
        self._pairs: list[Any] = pairs
        self._texts = texts
        self._fields = fields
        self._alone = isinstance(queries, _ALONE), isinstance(documents, _ALONE)
        self.prompts: list[Any]
        """Prompts for the engine."""
        self.prompt_names: list[str | None]
        """The name of the checkpoint's prompt that goes before each."""
        self.names: list[str]
        """Name of each prompt in errors."""
        if self.kind is ScoreKind.CROSS_ENCODER:
            self.prompts = list(pairs)
            self.prompt_names = [None] * len(pairs)
            self.names = [self._name(1, number) for number in range(len(pairs))]
            return
        first: dict[tuple[int, object], tuple[Scored, str]] = {}
        for number, pair in enumerate(pairs):
            for role in (0, 1):
                read = pair[role], self._name(role, number)
                first.setdefault((role, _key(pair[role])), read)
        places = {key: place for place, key in enumerate(first)}
        self._places = [
            (places[0, _key(query)], places[1, _key(document)]) for query, document in pairs
        ]
        self.prompts = [prompt for prompt, _ in first.values()]
        self.prompt_names = [
            _ROLES[role] if _ROLES[role] in texts.prompts else None for role, _ in first
        ]
        self.names = [name for _, name in first.values()]

    def _name(self, role: int, number: int) -> str:
        return self._fields[role] if self._alone[role] else f"{self._fields[role]}[{number}]"

    def culprit(self, error: RequestError) -> RequestError:
        """The error to report for `error`, which one of `prompts` raised: a pair may fail because
        of its query alone.

        It tokenizes the queries again."""
        if self.kind is not ScoreKind.CROSS_ENCODER or error.param != self._fields[1]:
            return error
        is_too_long = isinstance(error, ContextLengthError)
        first: dict[str, int] = {}
        for number, (query, _) in enumerate(self._pairs):
            if isinstance(query, str):
                first.setdefault(query, number)
        for query, number in first.items():
            name = self._name(0, number)
            most = self._texts.max_tokens
            try:
                [rendered] = self._texts.renderer.render_texts(
                    [query], max_tokens=None if is_too_long else most
                )
            except RequestError as cause:
                return type(cause)(f"{name}: {cause}", self._fields[0])
            if is_too_long and len(rendered.token_ids) >= most:
                limit = (
                    f"with a document it must stay within max_model_len, {most}. Please reduce "
                    "the length of the input prompt"
                )
                return ContextLengthError(
                    f"{name} alone has {len(rendered.token_ids)} tokens; {limit}.", self._fields[0]
                )
        return error

    def params(self, params: PoolingParams | None = None) -> PoolingParams:
        """`params` with the task, and with `normalize` set for the comparison. Raises
        RequestError."""
        params = PoolingParams() if params is None else params
        if not isinstance(params, PoolingParams):
            raise RequestError(
                f"params must be PoolingParams, not a {type(params).__name__}.", "params"
            )
        if params.task not in (self.task, PoolingParams().task):
            raise RequestError(
                f"this model scores by the task {self.task!r}, but params are for {params.task!r}.",
                "task",
            )
        return params.replace(
            task=self.task,
            normalize=self._normalize if params.normalize is None else params.normalize,
        )

    def scores(self, outputs: Sequence[PoolingRequestOutput]) -> list[PoolingRequestOutput]:
        """One for each pair, of what the engine gave for `prompts`."""
        if self.kind is ScoreKind.CROSS_ENCODER:
            return list(outputs)
        vectors = [
            self._compared(output, name)
            for output, name in zip(outputs, self.prompt_names, strict=True)
        ]
        return [
            self._score(outputs[i], outputs[j], vectors[i], vectors[j]) for i, j in self._places
        ]

    def _compared(self, output: PoolingRequestOutput, name: str | None) -> np.ndarray | None:
        """Vectors of an output that are compared; None if it failed."""
        role = None if name is None else self._roles.get(name)
        if output.outputs.data is None:
            return None
        # A face may have made a tensor of it.
        data = np.asarray(output.outputs.data)
        return data if role is None else data[role.compared(output.prompt_token_ids)]

    def _score(
        self,
        query: PoolingRequestOutput,
        document: PoolingRequestOutput,
        first: np.ndarray | None,
        second: np.ndarray | None,
    ) -> PoolingRequestOutput:
        score = (
            None if first is None or second is None else np.array([self._compare(first, second)])
        )
        return replace(document, outputs=PoolingOutput(score), error=query.error or document.error)


def _pairs(
    queries: Scored | Sequence[Scored],
    documents: Scored | Sequence[Scored],
    fields: tuple[str, str],
) -> list[tuple[Scored, Scored]]:
    queries, documents = _texts(queries, fields[0]), _texts(documents, fields[1])
    if len(queries) == 1:
        queries = queries * len(documents)
    if len(queries) != len(documents):
        wanted = "give one query, or one for each document"
        raise RequestError(
            f"{len(queries)} queries for {len(documents)} documents: {wanted}.", fields[0]
        )
    return list(zip(queries, documents, strict=True))


def _texts(texts: Any, param: str) -> list[Scored]:
    if isinstance(texts, _ALONE):
        texts = [texts]
    if not isinstance(texts, list | tuple) or not all(
        isinstance(text, str) or has_media(text) for text in texts
    ):
        raise RequestError(
            f"{param} must be a text, a prompt with media ('multi_modal_data' or 'content'), or a "
            "list of these.",
            param,
        )
    return list(texts)


def _check_texts(pairs: Sequence[tuple[Scored, Scored]], fields: tuple[str, str]) -> None:
    """Raises RequestError for a pair that is not of two texts."""
    for pair in pairs:
        for text, field in zip(pair, fields, strict=True):
            if not isinstance(text, str):
                raise RequestError(
                    f"{field}: this model reads pairs of texts. Models that compare images with "
                    "texts have vectors of them: see token_embed and embed.",
                    field,
                )


def _key(prompt: Scored) -> object:
    """Equal prompts have equal keys, apart from those with media."""
    return prompt if isinstance(prompt, str) else id(prompt)
