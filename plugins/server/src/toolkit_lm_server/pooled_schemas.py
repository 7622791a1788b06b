"""Shapes of the answers of pooling models, for the description of the API."""

from __future__ import annotations

from typing import Literal

from toolkit_lm_server.answer_schemas import CachedTokens, Head
from toolkit_lm_server.schema_texts import Described


class PoolingUsage(Described):
    prompt_tokens: int
    """Tokens of the prompts."""
    completion_tokens: int
    """0: nothing is generated."""
    total_tokens: int
    """Tokens of both."""
    prompt_tokens_details: CachedTokens
    """Kinds of prompt tokens."""


class Embedding(Described):
    object: Literal["embedding"]
    """The kind of object."""
    index: int
    """The place of the input, from 0 on."""
    embedding: list[float] | str
    """The vector's numbers, or a text: base64 of float32 values, little-endian."""


class EmbeddingList(Head):
    object: Literal["list"]
    """The kind of object."""
    data: list[Embedding]
    """The entries, in order."""
    usage: PoolingUsage
    """Numbers of tokens."""


class Pooled(Described):
    object: Literal["pooling"]
    """The kind of object."""
    index: int
    """The place of the input, from 0 on."""
    data: list[float] | list[list[float]] | str
    """The result: numbers, or base64 of them."""
    shape: list[int] = []
    """The shape of the array whose base64 is in `data`."""


class PooledList(Head):
    object: Literal["list"]
    """The kind of object."""
    data: list[Pooled]
    """The entries, in order."""
    usage: PoolingUsage
    """Numbers of tokens."""


class Classification(Described):
    index: int
    """The place of the input, from 0 on."""
    label: str
    """The likeliest label."""
    probs: list[float]
    """Probabilities by label, in the order of the model's labels."""
    num_classes: int
    """The number of labels."""


class Classifications(Head):
    object: Literal["list"]
    """The kind of object."""
    data: list[Classification]
    """The entries, in order."""
    usage: PoolingUsage
    """Numbers of tokens."""


class Score(Described):
    index: int
    """The place of the input, from 0 on."""
    object: Literal["score"]
    """The kind of object."""
    score: float
    """How well the texts fit together."""


class Scores(Head):
    object: Literal["list"]
    """The kind of object."""
    data: list[Score]
    """The entries, in order."""
    usage: PoolingUsage
    """Numbers of tokens."""


class ApiVersion(Described):
    version: str
    """The version of Cohere's API."""


class BilledUnits(Described):
    input_tokens: int = 0
    """Tokens of the inputs."""
    search_units: int = 0
    """Documents that were ranked, in Cohere's units."""


class CohereMeta(Described):
    api_version: ApiVersion
    """The version of Cohere's API."""
    billed_units: BilledUnits
    """Numbers of tokens and searches."""


class Document(Described):
    text: str
    """The text."""


class RerankResult(Described):
    index: int
    """The document's place in the request."""
    relevance_score: float
    """How well the document fits the query."""
    document: Document | None = None
    """The document, where the request asks for it."""


class Ranking(Described):
    id: str
    """The object's id."""
    model: str
    """The model that answered, by its first name."""
    results: list[RerankResult]
    """The documents, the best first."""
    usage: PoolingUsage
    """Numbers of tokens."""
    meta: CohereMeta
    """Facts about the answer."""


class CohereEmbeddings(Described):
    id: str
    """The object's id."""
    response_type: Literal["embeddings_by_type"]
    """The shape of `embeddings`."""
    embeddings: dict[
        Literal["float", "int8", "uint8", "binary", "ubinary", "base64"],
        list[list[float]] | list[str],
    ]
    """Vectors of the texts, by type."""
    texts: list[str]
    """The texts of the request."""
    meta: CohereMeta
    """Facts about the answer."""


class OldCohereEmbeddings(Described):
    id: str
    """The object's id."""
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    """The shape of `embeddings`."""
    embeddings: list[list[float]] | dict[str, list[list[float]] | list[str]]
    """A list of vectors. Where the request asks for types, an object with such a list by type."""
    texts: list[str]
    """The texts of the request."""
    meta: CohereMeta
    """Facts about the answer."""
